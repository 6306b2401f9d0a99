"""Bodies that cost too much to read, and answers that cost less to write."""

import json

import pytest
from starlette.responses import JSONResponse

from ridgeline.router.front.middleware.json_cost import MAX_COST, cost
from ridgeline.router.front.vllm_workarounds.app_gaps import QuickJson


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [5] * (MAX_COST + 10)},
        {"prompt": ["a"] * (MAX_COST // 20)},
        {"messages": [{"role": "user", "content": "a"}] * (MAX_COST // 150)},
        {"x": [[]] * (MAX_COST // 2)},
    ],
)
def test_millions_of_numbers_or_thousands_of_objects_cost_too_much(body):
    assert cost(json.dumps(body, separators=(",", ":")).encode()) > MAX_COST


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [123456] * 900_000},
        {"prompt": "one, two, {three}: " * 200_000},
        {"prompt": 'she said "no", {} [] \\ \\" ' * 200_000},
        {"messages": [{"role": "user", "content": 'def f(x): return {"a": [x, 1]}\n' * 200}] * 2000},
    ],
)
def test_long_texts_whatever_is_in_them_and_long_prompts_do_not(body):
    assert cost(json.dumps(body).encode()) <= MAX_COST


def test_a_body_that_is_not_json_is_judged_too_and_left_to_the_parser():
    assert cost(b'{"prompt": "never ends, {{{{') < MAX_COST
    assert cost(b"\xff" * 1000) == 0


@pytest.mark.parametrize(
    "content",
    [
        {"a": [1, 2.5, None, True, "\u00e4\n\U0001f600"], "b": {7: {"logprob": -9999.0}}, "c": 1e300},
        {"error": {"message": "m", "code": 400}},
        [],
    ],
)
def test_an_answer_is_the_same_json_as_before(content):
    assert json.loads(QuickJson(content).body) == json.loads(JSONResponse(content).body)
