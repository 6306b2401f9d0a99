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

from ridgeline.router.front.vllm_workarounds import unread
from ridgeline.router.front.vllm_workarounds.unread import BoundedCollector, look
from tests.components.router.front.test_http import body, stepping
from tests.support.fake_engine import FakeEngine
from tests.support.patience import eventually
from tests.support.served_router import serving

LONG = 600


class Holder:
    """A stream, or a connection."""

    def __init__(self, unread_bytes, silent_s=0.0):
        self.unread_bytes, self._silent_s, self.ended = unread_bytes, silent_s, ""

    def silent_s(self, now_s):
        return self._silent_s

    def give_up(self, why):
        self.ended = why


def test_who_takes_nothing_for_too_long_ends_and_so_do_the_largest_while_all_are_too_much():
    connections = [Holder(10, silent_s=31.0), Holder(500), Holder(60, silent_s=29.0)]
    streams = [Holder(400), Holder(100)]
    whys = []
    look(connections, streams, 30.0, 200, whys.append)
    assert [holder.ended for holder in connections] == ["deadline", "total_bytes", ""]
    assert [holder.ended for holder in streams] == ["total_bytes", ""]
    assert whys == ["deadline", "total_bytes", "total_bytes"]


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
    monkeypatch.setattr(unread, "LATE_S", 0.2)
    client, silent, whys = Reads(), Holder(10), []
    watching = asyncio.create_task(unread.watch(lambda: [client, silent], list, 0.4, 1000, whys.append))
    await asyncio.sleep(0.05)
    reading = asyncio.create_task(client.go_on())
    stand_still(1.0)
    for _ in range(10):
        await asyncio.sleep(0.05)
    assert whys == []
    silent._silent_s = 1.0
    await eventually(lambda: silent.ended)
    assert (client.ended, whys) == ("", ["deadline"])
    for task in (watching, reading):
        task.cancel()


def output(tokens, finished=False):
    one = CompletionOutput(index=0, text="x" * tokens, token_ids=[1] * tokens, cumulative_logprob=None, logprobs=None)
    return RequestOutput("r", None, [1], None, [one], finished)


async def test_a_stream_that_is_not_read_is_ended_by_its_bytes_and_one_that_is_read_is_not():
    whys = []
    collector = BoundedCollector(RequestOutputKind.DELTA, "r", 10_000, whys.append)
    for _ in range(100):
        collector.put(output(20))
        assert collector.get_nowait() is not None
    assert (whys, collector.unread_bytes) == ([], 0)
    while not whys:
        collector.put(output(20))
    assert whys == ["stream_bytes"]
    collector.put(RuntimeError("ended"))
    collector.put(output(400))  # what was on its way: nobody will read it, and nothing keeps it
    assert (whys, collector.unread_bytes) == (["stream_bytes"], 0)
    with pytest.raises(RuntimeError):
        await collector.get()


async def test_a_whole_answer_in_one_piece_is_not_ended_by_the_bytes_of_a_stream():
    whys = []
    collector = BoundedCollector(RequestOutputKind.FINAL_ONLY, "r", 10_000, whys.append)
    collector.put(output(4000, finished=True))
    assert whys == []
    assert collector.unread_bytes > 10_000


def of_sequence(index, token, prompt_logprobs):
    one = CompletionOutput(index=index, text="x", token_ids=[token], cumulative_logprob=None, logprobs=None)
    return RequestOutput("r", None, [1], prompt_logprobs, [one], finished=False)


async def test_the_log_probabilities_of_the_prompt_are_kept_when_a_later_sequence_brings_them_to_an_unread_output():
    """vLLM's streams with `echo` take them from the output in which a sequence comes first."""
    collector = BoundedCollector(RequestOutputKind.DELTA, "r", 10_000, [].append)
    collector.put(of_sequence(0, 7, [None]))
    assert (await collector.get()).prompt_logprobs == [None]
    collector.put(of_sequence(0, 8, []))  # vLLM tells them once a sequence
    collector.put(of_sequence(1, 9, [None]))
    merged = await collector.get()
    assert [(one.index, one.token_ids) for one in merged.outputs] == [(0, [8]), (1, [9])]
    assert merged.prompt_logprobs == [None]


# --- over HTTP


@asynccontextmanager
async def unread_answer(http, **fields):
    """A connection that has asked for a long stream and reads none of it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", http.base_url.port))
    request = json.dumps(body(max_tokens=LONG, stream=True, **fields)).encode()
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
        assert router._client.accepted == 1, "and a drain still waits for it"
        assert len(decode.aborted) == 0
        assert await router.drain(0.0) == 1


async def test_a_drain_waits_for_a_client_that_does_not_read_until_the_write_deadline(model, registry):
    async with running(model, registry, send_timeout_s=0.5) as (http, router, _decode):
        async with unread_answer(http):
            await eventually(lambda: router._client.accepted == 1)
            assert await router.drain(20.0) == 0
        assert registry.get_sample_value("ridgeline_unread_answers_ended_total", {"why": "deadline"}) == 1


async def test_a_stream_that_is_not_read_is_aborted_on_the_workers_once_it_is_too_long(model, registry):
    async with running(model, registry, max_stream_buffer_bytes=4_000) as (http, router, decode):
        async with unread_answer(http):
            await eventually(lambda: decode.aborted)
            await eventually(lambda: router._client._admission.sequences == 0)
            assert router._client.streams[0].unread_bytes == 0
        await eventually(lambda: not router._client.streams)
        assert registry.get_sample_value("ridgeline_unread_answers_ended_total", {"why": "stream_bytes"}) == 1
