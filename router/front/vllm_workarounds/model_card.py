"""GET /v1/models/{model}: OpenAI's `models.retrieve`, which some clients ask before anything else.

vLLM's app has no such path.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

PATH: Final = "/v1/models/{model:path}"  # names of models have slashes


async def _model(request: Request) -> JSONResponse:
    models, name = request.app.state.openai_serving_models, request.path_params["model"]
    listed = await models.show_available_models()
    if not name:  # /v1/models/
        return JSONResponse(listed.model_dump())
    card = next((card for card in listed.data if card.id == name), None)
    if card is not None:
        return JSONResponse(card.model_dump())
    refused = create_error_response(
        f"The model `{name}` does not exist; GET /v1/models lists what is served.",
        err_type="NotFoundError",
        status_code=HTTPStatus.NOT_FOUND,
        param="model",
    )
    return JSONResponse(refused.model_dump(), refused.error.code)


def install(app: Any) -> None:
    """Add the route."""
    app.add_route(PATH, _model, methods=["GET"])
