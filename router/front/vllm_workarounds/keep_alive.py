"""Keep-alive comments on /v1/messages and /v1/responses too (`server_args.sse_keep_alive_interval`).

vLLM sends them in chats and completions. Proxies cut a silent stream after a minute, and a long prompt that waits in a
queue is silent for longer.
"""

from __future__ import annotations

from typing import Final

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from vllm.entrypoints.anthropic import api_router as messages_routes
from vllm.entrypoints.openai.responses import api_router as responses_routes
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive

_SILENT_ROUTES: Final = (messages_routes, responses_routes)


class KeptAlive(StreamingResponse):
    """A streamed answer with vLLM's comments in its silences."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request by the ASGI protocol."""
        interval_s = float(scope["app"].state.args.sse_keep_alive_interval)
        self.body_iterator = with_sse_keep_alive(self.body_iterator, interval_s)
        await super().__call__(scope, receive, send)


def install() -> None:
    """Give vLLM's routes this class. Installing it again changes nothing."""
    for module in _SILENT_ROUTES:
        vars(module)["StreamingResponse"] = KeptAlive
