"""What is put around vLLM's app: bodies on which validation fails, streams that break, paths that could only fail."""

import json
from contextlib import aclosing

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from openai.types.responses import ResponseOutputMessage
from pydantic import BaseModel, model_validator
from starlette.responses import JSONResponse
from vllm.entrypoints.openai.responses.utils import construct_input_messages

from ridgeline.router.front.http.context import WithContext
from ridgeline.router.front.vllm_workarounds import app_gaps


class Body(BaseModel):
    options: dict[str, int]

    @model_validator(mode="before")
    @classmethod
    def takes_types_for_granted(cls, data):
        data["options"].get("a")
        return data


def make_app():
    app = FastAPI()

    @app.post("/read")
    async def read(body: Body):
        return {}

    @app.post("/fail")
    async def fail():
        return {}["nothing"]

    @app.post("/by-hand")
    async def by_hand(request: Request):
        return await request.json()

    @app.post("/responses")
    async def responses(request: Request):
        message = ResponseOutputMessage.model_validate(await request.json())
        return construct_input_messages(request_input=[message])

    @app.post("/stream")
    async def stream(error: str):
        async def events():
            yield "data: {}\n\n"
            raise {"value": ValueError, "key": KeyError}[error]("it broke")

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.post("/scale_elastic_ep")
    async def scale():
        return {}

    app.middleware_stack = app.build_middleware_stack()  # as vLLM does
    app_gaps.install(app)
    return WithContext(app_gaps.ended_streams(app))


async def post(path, **options):
    transport = httpx.ASGITransport(make_app(), raise_app_exceptions=False)
    async with aclosing(transport), httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        return await client.post(path, **options)


SAID = {"type": "output_text", "text": "yes", "annotations": []}
EARLIER = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [SAID]}


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        pytest.param("/read", {"options": {"a": 1}}, 200, id="a body"),
        *(pytest.param("/read", body, 400, id="a validator fails") for body in ({"options": 7}, {"options": [1]}, {})),
        pytest.param("/by-hand", b"[" * 50_000, 400, id="lists without end"),
        pytest.param("/by-hand", b'{"a":' * 50_000, 400, id="objects without end"),
        pytest.param("/responses", EARLIER, 200, id="an earlier answer"),
        pytest.param("/responses", EARLIER | {"content": []}, 400, id="one without a text"),
        pytest.param("/responses", EARLIER | {"content": [{"type": "refusal", "refusal": "no"}]}, 400, id="a refusal"),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused_as_the_clients_fault(path, content, status):
    answer = await post(path, **{"content" if isinstance(content, bytes) else "json": content})
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["message"]


async def test_the_same_error_outside_of_validation_stays_an_error_of_the_server():
    assert (await post("/fail")).status_code == 500


@pytest.mark.parametrize(("error", "code"), [("value", 400), ("key", 500)])
async def test_a_stream_that_fails_in_the_middle_ends_with_an_event_that_says_so(error, code):
    answer = await post(f"/stream?error={error}")
    assert answer.status_code == 200
    first, event = answer.text.strip().split("\n\n")
    assert first == "data: {}"
    assert event.startswith("event: error\ndata: {")
    assert f'"code": {code}' in event


async def test_paths_that_resize_an_engine_are_not_there():
    assert (await post("/scale_elastic_ep", json={})).status_code == 404


@pytest.mark.parametrize(
    "content",
    [
        {"a": [1, 2.5, None, True, "\u00e4\n\U0001f600"], "b": {7: {"logprob": -9999.0}}, "c": 1e300},
        {"error": {"message": "m", "code": 400}},
        [],
    ],
)
def test_an_answer_is_the_same_json_as_before(content):
    assert json.loads(app_gaps.QuickJson(content).body) == json.loads(JSONResponse(content).body)
