"""Prints a server's answers to a fixed set of requests: text, finish reason, usage; to be compared by diff.

usage: python -m tools.bench.answers URL      (Ridgeline and a plain `vllm serve` with the same model and dtype)
"""

from __future__ import annotations

import json
import sys
from typing import Any

import httpx

CHAT = {"messages": [{"role": "user", "content": "Name three colours of the rainbow."}], "temperature": 0}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {"max_tokens": 24}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 24, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 1}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 24, "logprobs": True, "top_logprobs": 2}),
    ("/v1/completions", {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0, "logprobs": 2}),
    ("/v1/completions", {"prompt": "One, two, three,", "max_tokens": 32, "temperature": 0, "stop": ["seven"]}),
    ("/v1/completions", {"prompt": ["Light is", "Water is"], "max_tokens": 6, "temperature": 0}),
    ("/v1/completions", {"prompt": "Glass", "max_tokens": 6, "temperature": 0.8, "seed": 7, "n": 2}),
    ("/v1/completions", {"prompt": "A prism", "max_tokens": 8, "temperature": 0, "presence_penalty": 1.0}),
    ("/v1/messages", {"max_tokens": 12, "temperature": 0, "messages": CHAT["messages"]}),
]


def streamed(text: str) -> dict[str, Any]:
    """Return one answer, joined from a stream of server-sent events."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    return {
        "text": "".join(choice["delta"].get("content") or "" for choice in choices),
        "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": events[-1]["usage"],
    }


def whole(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of an answer that must not depend on the server."""
    if "choices" not in answer:
        return {"text": answer["content"][0]["text"], "finish": answer["stop_reason"], "usage": answer["usage"]}
    choices = answer["choices"]
    return {
        "text": [choice.get("text") or choice["message"]["content"] for choice in choices],
        "finish": [choice["finish_reason"] for choice in choices],
        "usage": answer["usage"],
    }


def main(url: str) -> None:
    """Print one line of JSON for each request."""
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        for path, body in REQUESTS:
            response = client.post(path, json={"model": model, **body})
            response.raise_for_status()
            answer = streamed(response.text) if body.get("stream") else whole(response.json())
            sys.stdout.write(json.dumps({"path": path, **answer}, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
