"""Corrects answers of vLLM's API server app, and adds what is missing.

The app is written for a server with one engine, and some of its checks of a body crash instead of refusing it.
"""

from __future__ import annotations

import json
import logging
import re
from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from traceback import walk_tb
from types import FrameType
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from vllm.entrypoints.anthropic import api_router as messages_routes
from vllm.entrypoints.openai.chat_completion import api_router as chat_routes
from vllm.entrypoints.openai.completion import api_router as completion_routes
from vllm.entrypoints.openai.responses import api_router as responses_routes
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive
from vllm.renderers import hf
from vllm.renderers.chat_utils import ChatTemplateResolutionError

from ridgeline.engine.passed_args import is_servers
from ridgeline.router.front.http.context import current
from ridgeline.router.front.http.types import Asgi, Receive, Scope, Send

logger = logging.getLogger(__name__)

NOT_OFFERED = ("/scale_elastic_ep", "/is_scaling_elastic_ep", "/v1/systemone")
"""Routes that resize the server's own engine, which the router does not have, or that no generating model serves."""
_NO_CHAT_TEMPLATE = (
    "the model's tokenizer has no chat template: set server_args.chat_template to one, or use /v1/completions"
)
_FLAG = re.compile(r"--([a-z]+(?:-[a-z]+)*)")
_READING_BODIES = ("loads", "validate_python", "validate_json", "model_validate", "model_validate_json")
_READING = {
    "json": _READING_BODIES,
    "pydantic": _READING_BODIES,
    "vllm": ("construct_chat_messages_with_tool_call",),  # assumes that an earlier answer has text
}
"""Functions, by package, that read a body."""
_ROUTES_OF_LONG_ANSWERS = (chat_routes, completion_routes)
_SILENT_ROUTES = (messages_routes, responses_routes)
_MODEL = "/v1/models/{model:path}"  # names of models have slashes
_stream_response = StreamingResponse.stream_response
_RAISED_BY_READING = (AttributeError, LookupError, AssertionError, RecursionError, ArithmeticError)
"""Errors caused by endless nesting, and by checks that assume a value's type; pydantic refuses only ValueErrors."""


class QuickJson(JSONResponse):
    """JSON encoded ten times faster: with log-probabilities, encoding would otherwise stop every stream meanwhile."""

    def render(self, content: Any) -> bytes:
        """Encode the same JSON."""
        try:
            return msgspec.json.encode(content)
        except (TypeError, ValueError, RecursionError):
            return super().render(content)


class KeptAlive(StreamingResponse):
    """A streamed answer with vLLM's comments in its silences (`server_args.sse_keep_alive_interval`).

    Proxies cut a silent stream after a minute, and a long prompt that waits in a queue is silent for longer.
    """

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request by the ASGI protocol."""
        interval_s = float(scope["app"].state.args.sse_keep_alive_interval)
        self.body_iterator = with_sse_keep_alive(self.body_iterator, interval_s)
        await super().__call__(scope, receive, send)


async def _ends_without_an_error(self: StreamingResponse, send: Any) -> None:
    """Write an answer; when cancelled, end, which is all that its task is to do then.

    Starlette cancels the task when the client has left. If it ended with the CancelledError, anyio would keep it in a
    variable of a function that is in the error's own traceback. That circle, and with it the whole request, would stay
    until Python looks through all objects for garbage.
    """
    with suppress(CancelledError):
        await _stream_response(self, send)


async def _model(request: Request) -> JSONResponse:
    """Answer OpenAI's `models.retrieve`, which some clients ask before anything else."""
    models, name = request.app.state.openai_serving_models, request.path_params["model"]
    listed = await models.show_available_models()
    if not name:  # /v1/models/
        return JSONResponse(listed.model_dump())
    card = next((card for card in listed.data if card.id == name), None)
    if card is not None:
        return JSONResponse(card.model_dump())
    sentence = f"The model `{name}` does not exist; GET /v1/models lists what is served."
    kind, status = "NotFoundError", HTTPStatus.NOT_FOUND
    refused = create_error_response(sentence, err_type=kind, status_code=status, param="model")
    return JSONResponse(refused.model_dump(), refused.error.code)


@contextmanager
def root_logger_kept() -> Iterator[None]:
    """Restore log levels that importing vLLM's app changes.

    A library that the app imports, for SageMaker, raises the root logger and its handlers to ERROR, which would silence
    our warnings.
    """
    root, levels = logging.root.level, [(handler, handler.level) for handler in logging.root.handlers]
    try:
        yield
    finally:
        logging.root.setLevel(root)
        for handler, level in levels:
            handler.setLevel(level)


def install(app: Any) -> None:
    """Remove routes of vLLM's FastAPI app that can only fail, correct others, and refuse what validation fails on.

    Installing it for another app changes nothing of the process.
    """
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) not in NOT_OFFERED]
    for module in _ROUTES_OF_LONG_ANSWERS:
        vars(module)["JSONResponse"] = QuickJson
    for module in _SILENT_ROUTES:
        vars(module)["StreamingResponse"] = KeptAlive
    StreamingResponse.stream_response = _ends_without_an_error  # type: ignore[method-assign]
    app.add_route(_MODEL, _model, methods=["GET"])
    vars(hf)["ChatTemplateResolutionError"] = lambda _: ChatTemplateResolutionError(_NO_CHAT_TEMPLATE)
    for kind in _RAISED_BY_READING:
        app.add_exception_handler(kind, _refuse_unreadable)
    app.middleware_stack = None  # vLLM has already built it without these; the first request builds it again


def name_settings(state: Any) -> None:
    """Make errors of vLLM's app name settings as they are called in this server's configuration."""
    renderer = state.online_renderer
    answer = renderer.create_error_response

    def with_our_names(message: Any, *args: Any, **kwargs: Any) -> Any:
        renamed = _FLAG.sub(_our_name, message) if isinstance(message, str) else message
        return answer(renamed, *args, **kwargs)

    vars(renderer)["create_error_response"] = with_our_names


def refuse_unknown_ids(state: Any) -> None:
    """Make /detokenize refuse ids outside of the vocabulary, which tokenizers leave out or overflow on."""
    serving = state.serving_tokenization
    detokenize = serving.create_detokenize

    async def checked(request: Any, *rest: Any) -> Any:
        serving.renderer.validate_token_ids(request.tokens, parameter="tokens")
        return await detokenize(request, *rest)

    vars(serving)["create_detokenize"] = checked


def _our_name(flag: re.Match[str]) -> str:
    name = flag[1].replace("-", "_")
    return f"server_args.{name}" if is_servers(name) else flag[0]


async def _refuse_unreadable(_request: Any, error: Exception) -> JSONResponse:
    """Answer 400 if the error was raised while a body was read; otherwise raise it again, which gives a 500."""
    if not any(_reads(frame) for frame, _ in walk_tb(error.__traceback__)):
        raise error
    answer = create_error_response(f"the request cannot be understood: {error}")
    return JSONResponse(answer.model_dump(), status_code=answer.error.code)


def _reads(frame: FrameType) -> bool:
    package = frame.f_globals.get("__name__", "").split(".")[0]
    return frame.f_code.co_name in _READING.get(package, ())


def ended_streams(app: Asgi) -> Asgi:
    """End a stream with an error event if its generator fails after the status was sent, instead of cutting it off."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except Exception as error:
            if not current().streams:
                raise
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            answer = create_error_response(cause)
            if answer.error.code >= 500:
                logger.exception("an answer failed after its status had been sent")
            event = f"event: error\ndata: {json.dumps(answer.model_dump())}\n\n"
            await send({"type": "http.response.body", "body": event.encode(), "more_body": False})

    return serve
