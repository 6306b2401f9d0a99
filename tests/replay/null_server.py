"""An OpenAI-compatible server without a model: it streams the tokens asked for at a fixed pace, and nothing else.

Token k of an answer is due at a fixed time after the request, so a late token does not delay the next ones.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

from aiohttp import web

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
