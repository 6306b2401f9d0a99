"""Stream an answer with the `openai` package, and print TTFT and the mean time per further chunk.

ridgeline serve -c deploy/local.yaml
python examples/stream_openai.py --url http://127.0.0.1:8000 "Why is the sky blue?"
"""

from __future__ import annotations

import argparse
import time

from openai import OpenAI


def main() -> None:
    """Print each piece of the answer as it arrives, then the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="none", help="needed if the server has security.api_keys_file")
    parser.add_argument("--max-tokens", type=int, default=48)
    options = parser.parse_args()

    client = OpenAI(base_url=f"{options.url}/v1", api_key=options.api_key)
    model = client.models.list().data[0].id
    sent_s = time.monotonic()
    # Completions, because every model has them; with a chat template, client.chat.completions.create streams alike.
    stream = client.completions.create(
        model=model,
        prompt=options.prompt,
        max_tokens=options.max_tokens,
        stream=True,
        # How soon the tokens are wanted. Mode adaptive serves by these SLOs, other modes remember them.
        extra_headers={"x-ridgeline-ttft-ms": "2000", "x-ridgeline-tpot-ms": "100"},
    )
    arrivals_s: list[float] = []
    for chunk in stream:
        if chunk.choices and chunk.choices[0].text:
            arrivals_s.append(time.monotonic())
            print(chunk.choices[0].text, end="", flush=True)
    print()
    if arrivals_s:
        ttft_ms, rest_ms = 1e3 * (arrivals_s[0] - sent_s), 1e3 * (arrivals_s[-1] - arrivals_s[0])
        print(f"TTFT {ttft_ms:.0f} ms, then {rest_ms / max(1, len(arrivals_s) - 1):.1f} ms")


if __name__ == "__main__":
    main()
