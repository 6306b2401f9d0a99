"""Clients that do not read: what is kept for them, what it costs others, and when it ends."""

import asyncio
import json
import socket
import time
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from ridgeline.router.front.middleware import http_protocol
from ridgeline.router.front.middleware.http_protocol import look, watch_readers
from ridgeline.router.front.vllm_workarounds.unread import TOKEN_BYTES, CountingCollector
from tests.components.router.front.test_http import body, stepping
from tests.support.fake_engine import FakeEngine
from tests.support.patience import eventually
from tests.support.served_router import serving

LONG = 600


class Holder:
    """A connection."""

    def __init__(self, unread_bytes, silent_s=0.0):
        self.unread_bytes, self._silent_s, self.ended = unread_bytes, silent_s, False

    def silent_s(self, now_s):
        return self._silent_s

    def give_up(self):
        self.ended = True


@pytest.mark.parametrize(
    ("connections", "ended", "whys"),
    [
        pytest.param([(10, 31.0), (160, 29.0)], [0], ["deadline"], id="whoever takes nothing for too long"),
        pytest.param([(60, 1.0), (500, 1.0), (100, 1.0)], [1], ["total_bytes"], id="the furthest behind of too much"),
        pytest.param(
            [(500, 1.0), (400, 1.0), (100, 1.0)], [0, 1], ["total_bytes"] * 2, id="until the rest is within the limit"
        ),
        pytest.param([(190, 0.0), (60, 1.0)], [1], ["total_bytes"], id="not whoever reads, before those who do not"),
        pytest.param([(190, 0.0), (180, 0.0)], [0], ["total_bytes"], id="whoever reads too slowly"),
    ],
)
def test_who_is_ended(connections, ended, whys):
    holders, told = [Holder(*one) for one in connections], []
    look(holders, 30.0, 200, told.append)
    assert [number for number, holder in enumerate(holders) if holder.ended] == ended
    assert told == whys


class Reads(Holder):
    """A connection whose client reads all that it gets, and gets something whenever the loop turns."""

    def __init__(self):
        super().__init__(10)
        self.taken_s = time.monotonic()

    def silent_s(self, now_s):
        return now_s - self.taken_s

    async def go_on(self):
        while True:
            self.taken_s = time.monotonic()
            await asyncio.sleep(0.05)


def stand_still(seconds):
    time.sleep(seconds)


async def test_a_router_that_stood_still_blames_no_client_that_reads(monkeypatch):
    monkeypatch.setattr(http_protocol, "LATE_S", 0.2)
    monkeypatch.setattr(http_protocol, "BoundedHeads", Holder)
    client, silent, whys = Reads(), Holder(10), []
    watching = asyncio.create_task(watch_readers({client, silent}, 0.4, 1000, whys.append))
    await asyncio.sleep(0.05)
    reading = asyncio.create_task(client.go_on())
    stand_still(1.0)
    for _ in range(10):
        await asyncio.sleep(0.05)
    assert whys == []
    silent._silent_s = 1.0
    await eventually(lambda: silent.ended)
    assert (client.ended, whys) == (False, ["deadline"])
    for task in (watching, reading):
        task.cancel()


def of_sequence(index, token, prompt_logprobs=None):
    one = CompletionOutput(index=index, text="x", token_ids=[token], cumulative_logprob=None, logprobs=None)
    return RequestOutput("r", None, [1], prompt_logprobs, [one], finished=False)


async def test_what_is_not_read_is_counted_until_it_is_read_or_replaced_by_an_error():
    collector = CountingCollector(RequestOutputKind.DELTA, "r")
    for take in (collector.get_nowait, collector.get):
        for number in (1, 2, 3):
            collector.put(of_sequence(0, 7))
            assert collector.unread_bytes == number * 2 * TOKEN_BYTES
        if (taken := take()) and asyncio.iscoroutine(taken):
            await taken
        assert collector.unread_bytes == 0
    collector.put(RuntimeError("ended"))
    collector.put(of_sequence(0, 7))  # what was on its way: nobody will read it, and nothing keeps it
    assert collector.unread_bytes == 0
    with pytest.raises(RuntimeError):
        await collector.get()


async def test_the_log_probabilities_of_the_prompt_are_kept_when_a_later_sequence_brings_them_to_an_unread_output():
    """vLLM's streams with `echo` take them from the output in which a sequence comes first."""
    collector = CountingCollector(RequestOutputKind.DELTA, "r")
    collector.put(of_sequence(0, 7, [None]))
    assert (await collector.get()).prompt_logprobs == [None]
    collector.put(of_sequence(0, 8, []))  # vLLM tells them once a sequence
    collector.put(of_sequence(1, 9, [None]))
    merged = await collector.get()
    assert [(one.index, one.token_ids) for one in merged.outputs] == [(0, [8]), (1, [9])]
    assert merged.prompt_logprobs == [None]


# --- over HTTP


@asynccontextmanager
async def unread_answer(http):
    """A connection that has asked for a very long stream and reads none of it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", http.base_url.port))
    request = json.dumps(body(max_tokens=4 * LONG, stream=True)).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: %s\r\ncontent-type: application/json\r\n"
    head += b"content-length: %d\r\n\r\n"
    await loop.sock_sendall(sock, head % (b"i" * 200, len(request)) + request)
    try:
        yield sock
    finally:
        sock.close()


@pytest.fixture
def registry(monkeypatch):
    registry = CollectorRegistry()
    monkeypatch.setattr("ridgeline.router.server.KERNEL_UNSENT_BYTES", 4096)
    return registry


@asynccontextmanager
async def running(model, registry, **changes):
    """(HTTP client, router, decode engine), the engines making steps."""
    engines = FakeEngine("prefill", stepping="manual"), FakeEngine("decode", stepping="manual")
    async with serving(model, engines, registry=registry, **changes) as (http, router, prefill, decode):
        steppers = [asyncio.create_task(stepping(engine)) for engine in (prefill, decode)]
        yield http, router, decode
        for stepper in steppers:
            stepper.cancel()


async def test_a_slot_is_free_when_the_sequences_have_ended_and_a_drain_waits_for_the_reader(model, registry):
    async with running(model, registry, send_timeout_s=600.0) as (http, router, decode), unread_answer(http):
        await eventually(lambda: router._client._unread)
        assert router._client._admission.sequences == 0, "its slot is free"
        assert len(decode.aborted) == 0
        assert await router.drain(0.0) == 1, "and a drain still waits for it"


async def test_a_drain_waits_for_a_client_that_does_not_read_until_the_write_deadline(model, registry):
    async with running(model, registry, send_timeout_s=0.5) as (http, router, _decode):
        async with unread_answer(http):
            await eventually(lambda: router._client.accepted == 1)
            assert await router.drain(20.0) == 0
        assert registry.get_sample_value("ridgeline_unread_answers_ended_total", {"why": "deadline"}) == 1


async def test_an_unread_stream_is_aborted_when_the_total_is_reached_and_one_that_is_read_goes_on(model, registry):
    limits = {"send_timeout_s": 600.0, "max_send_buffer_bytes": 30_000}
    async with running(model, registry, **limits) as (http, router, decode):
        async with unread_answer(http):
            answer = await http.post("/v1/completions", json=body(max_tokens=LONG, stream=True))
            assert answer.text.endswith("data: [DONE]\n\n")
            await eventually(lambda: decode.aborted)
            await eventually(lambda: router._client._admission.sequences == 0)
        await eventually(lambda: not router._client.streams)
        assert registry.get_sample_value("ridgeline_unread_answers_ended_total", {"why": "total_bytes"}) == 1
