"""The times that a client allows: read from headers, refused by name, and with every sequence on its way."""

import math

import httpx
import pytest
import pytest_asyncio
from hypothesis import example, given
from hypothesis import strategies as st

from ridgeline.router.dispatch.orchestrator import Orchestrator
from ridgeline.router.front.http.context import WithContext, current
from ridgeline.router.front.http.errors import HttpRefusal, send_error
from ridgeline.router.front.middleware.time_limits import TPOT, TTFT, note_limits, read_limit_s, read_timeout_s
from ridgeline.router.settings import LONGEST_LIMIT_MS, SHORTEST_LIMIT_MS
from tests.support.fake_engine import FakeEngine
from tests.support.http_server import listening
from tests.support.served_router import serving

LIMITS = ["x-ridgeline-ttft-ms", "x-ridgeline-tpot-ms"]
NO_NUMBERS = ["", "soon", "1,5", "1_000", "0x10", "ten", "5ms", "nan", "inf", "-inf", "1 2", "--1"]
OUT_OF_BOUNDS = ["0", "-0.0", "-20", "1e-400", "0.0001", "3600000.1", "1e300"]

number_like = st.text("0123456789.eE+-_ infa", max_size=12).map(str.encode)
anything = st.one_of(st.binary(max_size=60), number_like, st.floats().map(lambda number: str(number).encode()))


# --- what a value means


def outcome(read, *value):
    """(the number, None) or (None, the refusal)."""
    try:
        return read(*value), None
    except HttpRefusal as bad:
        return None, bad


@given(anything)
@example(b"9" * 400)
@example(b"\xff\xfe")
@example("٢٠".encode())  # digits to Python's str, though not to its bytes
def test_any_value_is_a_limit_within_the_bounds_or_is_refused_by_name(value):
    for name in (TTFT, TPOT):
        limit_s, bad = outcome(read_limit_s, name, value)
        if bad is None:
            assert SHORTEST_LIMIT_MS / 1e3 <= limit_s <= LONGEST_LIMIT_MS / 1e3
            assert limit_s == float(value.decode("ascii")) / 1e3
        else:
            assert str(bad).startswith(f"{name.decode()} must be a number of milliseconds from 0.1 to 3,600,000, not")
            assert bad.param == name.decode()
            assert len(str(bad)) < 300, "a refusal does not repeat whatever it was sent"


@given(anything)
def test_any_timeout_is_finite_and_above_zero_or_is_refused_by_name(value):
    timeout_s, bad = outcome(read_timeout_s, value)
    if bad is None:
        assert timeout_s > 0
        assert math.isfinite(timeout_s)
    else:
        assert str(bad).startswith("x-ridgeline-timeout-s must be a number of seconds above 0, not")


@given(st.floats(SHORTEST_LIMIT_MS, LONGEST_LIMIT_MS))
def test_every_number_within_the_bounds_is_taken_as_milliseconds(limit_ms):
    assert read_limit_s(TTFT, repr(limit_ms).encode()) == limit_ms / 1e3


# --- the layer


@pytest_asyncio.fixture
async def layer():
    """An HTTP client of the layer alone, with a limit for TTFT; it is told what the context says."""

    async def app(scope, receive, send):
        try:
            note_limits(scope["headers"], 2.0, None)
        except HttpRefusal as refusal:
            await send_error(send, refusal)
            return
        limits = f"{current().timeout_s} {current().ttft_limit_s} {current().tpot_limit_s}".encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": limits})

    async with listening(WithContext(app)) as url, httpx.AsyncClient(base_url=url) as http:
        yield http


async def test_headers_are_read_and_what_is_not_given_is_the_configurations(layer):
    assert (await layer.get("/")).text == "None 2.0 None"
    given_all = {"x-ridgeline-timeout-s": "9", "X-Ridgeline-TTFT-ms": "1500", "X-Ridgeline-TPOT-ms": "62.5"}
    assert (await layer.get("/", headers=given_all)).text == "9.0 1.5 0.0625"
    assert (await layer.get("/")).text == "None 2.0 None", "a request leaves nothing to the next"


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value", [*NO_NUMBERS, *OUT_OF_BOUNDS])
async def test_a_limit_that_means_nothing_is_a_bad_request_that_names_the_header(layer, name, value):
    refused = await layer.get("/", headers={name: value})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, name, 400)
    assert error["message"] == f"{name} must be a number of milliseconds from 0.1 to 3,600,000, not {value!r}"


# --- the whole router


@pytest_asyncio.fixture
async def sequences(model, monkeypatch):
    """(HTTP client, the sequences that it and /ready have begun) of a router with a limit for TPOT."""
    begun = []
    run = Orchestrator.run

    async def noted(self, request, emit):
        begun.append(request)
        await run(self, request, emit)

    monkeypatch.setattr(Orchestrator, "run", noted)
    engines = (FakeEngine("prefill"), FakeEngine("decode"))
    async with serving(model, engines, tpot_ms=250.0) as (http, *_):
        begun.clear()
        yield http, begun


async def test_limits_come_with_every_sequence_of_a_request(sequences):
    http, begun = sequences
    body = {"model": "m", "prompt": [5] * 8, "max_tokens": 3, "ignore_eos": True}
    plain = await http.post("/v1/completions", json=body)
    three = await http.post("/v1/completions", json=body | {"n": 3}, headers={"x-ridgeline-ttft-ms": "800"})
    own = {"x-ridgeline-ttft-ms": "800", "x-ridgeline-tpot-ms": "40"}
    stream = await http.post("/v1/completions", json=body | {"stream": True}, headers=own)
    assert [plain.status_code, three.status_code, stream.status_code] == [200] * 3
    limits = [(one.ttft_limit_s, one.tpot_limit_s) for one in begun]
    assert limits == [(None, 0.25), *[(0.8, 0.25)] * 3, (0.8, 0.04)]


async def test_a_probe_has_no_limit(sequences):
    http, begun = sequences
    ready = await http.get("/ready", headers=dict.fromkeys(LIMITS, "800"))
    assert ready.status_code == 200
    assert [(one.probe, one.ttft_limit_s, one.tpot_limit_s) for one in begun] == [(True, None, None)]


async def test_a_request_with_a_bad_limit_never_reaches_a_worker(sequences):
    http, begun = sequences
    body = {"model": "m", "prompt": [5] * 8, "max_tokens": 3}
    for name in LIMITS:
        for extra in ({}, {"stream": True}, {"n": 2}):
            refused = await http.post("/v1/completions", json=body | extra, headers={name: "0"})
            assert refused.status_code == 400
            assert name in refused.json()["error"]["message"]
    assert not begun
