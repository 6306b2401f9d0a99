"""An OpenAI-compatible server without a model: it streams the tokens asked for at a fixed pace, and nothing else.

What a load generator measures of it beyond that pace is the load generator's own. Token k of an answer is due at a
fixed time after the request, so a late token does not delay the next ones.

usage: python -m tools.bench.null_server [--ttft-ms 20] [--tpot-ms 10] [--port 0] [--tokenizer PATH]
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from aiohttp import web

from tools.bench.served import serve_until_closed, served

MODEL: Final = "null"
MAX_MODEL_TOKENS: Final = 131_072
MOST_BODY_BYTES: Final = 64 * 2**20
TEXT_TOKEN = b'data: {"choices":[{"index":0,"text":" word","finish_reason":null}]}\n\n'
CHAT_ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
CHAT_TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'


def make_app(ttft_s: float, tpot_s: float, tokenizer: str | None) -> web.Application:
    """Build the application: both completion endpoints, the list of models, and /health."""

    async def answer(request: web.Request) -> web.StreamResponse:
        came_s = asyncio.get_running_loop().time()
        asked: dict[str, Any] = json.loads(await request.read())
        total = int(asked.get("max_completion_tokens") or asked["max_tokens"])
        chat = "messages" in asked
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        if chat:
            await response.write(CHAT_ROLE)
        token = CHAT_TOKEN if chat else TEXT_TOKEN
        for number in range(total):
            await asyncio.sleep(came_s + ttft_s + number * tpot_s - asyncio.get_running_loop().time())
            last = number == total - 1
            await response.write(token.replace(b"null", b'"length"') if last else token)
        usage = {"completion_tokens": total}
        if isinstance(prompt := asked.get("prompt"), list):  # of a text only a tokenizer knows how many it has
            usage |= {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + total}
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(_: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "root": tokenizer, "max_model_len": MAX_MODEL_TOKENS}
        return web.json_response({"object": "list", "data": [card]})

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=MOST_BODY_BYTES)
    app.router.add_post("/v1/completions", answer)
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", health)
    return app


@contextmanager
def serving(ttft_s: float, tpot_s: float, *, tokenizer: str | None = None, port: int = 0) -> Iterator[str]:
    """Run the server as a process of its own while the block runs; yield its URL."""
    settings = ["--ttft-ms", f"{ttft_s * 1e3:g}", "--tpot-ms", f"{tpot_s * 1e3:g}", "--port", str(port)]
    named = ["--tokenizer", tokenizer] if tokenizer else []
    with served("tools.bench.null_server", *settings, *named) as url:
        yield url


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ttft-ms", type=float, default=20.0)
    parser.add_argument("--tpot-ms", type=float, default=10.0)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tokenizer")
    given = parser.parse_args()
    asyncio.run(serve_until_closed(make_app(given.ttft_ms / 1e3, given.tpot_ms / 1e3, given.tokenizer), given.port))
