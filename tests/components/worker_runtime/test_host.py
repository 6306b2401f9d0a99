"""The worker host and the router's client over real gRPC on loopback, with an engine that needs no model."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import grpc
import grpc.aio
import msgspec
import pytest
from vllm.sampling_params import SamplingParams

from ridgeline.cluster.runtime.handlers import HANDLERS
from ridgeline.contracts.errors import EngineFailed, InvalidTask, TaskRejected, WorkerDraining, WorkerLost
from ridgeline.contracts.tasks import Adapter, StepBatch, TokenDelta
from ridgeline.contracts.workers import (
    MIN_FITTED_STEPS,
    AbortRequest,
    Ack,
    AttachRequest,
    DrainRequest,
    LoadAdapter,
    OfferRequest,
    PairRequest,
    Role,
    StepModel,
    SubmitRequest,
    UnloadAdapter,
)
from ridgeline.decode_worker.handler import DecodeHandler
from ridgeline.engine.stall import StallWatch
from ridgeline.prefill_worker.handler import PrefillHandler
from ridgeline.worker_runtime.client import MEANT, OPTIONS, SERVICE, Meant, WorkerClient, decoder, encode
from ridgeline.worker_runtime.host import HEALTH_LOOK_S, RouterSession, Undeliverable, WorkerHost, kv_unneeded
from tests.support.clock import FakeClock
from tests.support.cut_route import Route
from tests.support.fake_engine import FakeEngine, FakeStats, make_task
from tests.support.patience import PATIENCE_S, eventually
from tests.support.samples import LAYOUT, make_handoff, next_token
from tests.support.task_deltas import task_deltas

METHODS = ("Describe", "Status", "ResetPrefixCache", "Submit", "Abort", "Drain", "Attach")


class Worker:
    """A host that serves, its engine, and one attached router."""

    def __init__(self, engine: FakeEngine, host: WorkerHost, client: WorkerClient) -> None:
        self.engine, self.host, self.client = engine, host, client

    async def tokens(self, task) -> list[int]:
        async with aclosing(task_deltas(self.client, task)) as deltas:
            return [token async for delta in deltas for token in delta.token_ids]


@asynccontextmanager
async def running_client(address: str, router_id: str = "router") -> AsyncIterator[WorkerClient]:
    client = WorkerClient(address, router_id)
    running = asyncio.create_task(client.run())
    try:
        yield client
        assert not running.done(), "it keeps trying"
    finally:
        running.cancel()
        await asyncio.wait([running])
        await client.close()


@asynccontextmanager
async def connected(address: str, router_id: str = "router") -> AsyncIterator[WorkerClient]:
    async with running_client(address, router_id) as client:
        await client.wait_connected(PATIENCE_S)
        yield client


@asynccontextmanager
async def serving(engine: FakeEngine | None = None, handler=None) -> AsyncIterator[Worker]:
    engine = engine or FakeEngine(stepping="manual")
    host = WorkerHost(engine, HANDLERS if handler is None else dict.fromkeys(("prefill", "decode"), handler))
    address = await host.start()
    try:
        async with asyncio.timeout(PATIENCE_S), connected(address) as client:
            yield Worker(engine, host, client)
    finally:
        await host.stop()


@pytest.fixture
def settles_quickly(monkeypatch):
    """A drained worker waits a fifth of a second for what may still be published, not a whole one."""
    monkeypatch.setattr("ridgeline.worker_runtime.host.SETTLED_S", 0.2)


@asynccontextmanager
async def raw_channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        yield channel


def attach(channel: grpc.aio.Channel, router_id: str, metadata=None):
    method = channel.unary_stream(
        f"/{SERVICE}/Attach", request_serializer=encode, response_deserializer=decoder(StepBatch)
    )
    return method(AttachRequest(router_id), metadata=metadata)


async def call(channel: grpc.aio.Channel, name: str, message, metadata=None):
    method = channel.unary_unary(f"/{SERVICE}/{name}", request_serializer=encode, response_deserializer=decoder(Ack))
    return await method(message, timeout=PATIENCE_S, metadata=metadata)


@asynccontextmanager
async def watched(*names: str) -> AsyncIterator[tuple[Worker, FakeClock]]:
    """A worker whose engine is watched by a clock that stands, with these tasks of one token at work.

    They end with one step, unless the test has ended them. That this process stood still is no news here before
    `PATIENCE_S`.
    """
    engine, clock = FakeEngine(stepping="manual"), FakeClock()
    engine.stats.stall = StallWatch(clock)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ridgeline.worker_runtime.host.LATE_S", PATIENCE_S)
        async with serving(engine) as worker:
            streams = [asyncio.create_task(worker.tokens(make_task(name, max_tokens=1))) for name in names]
            await eventually(lambda: engine.running == set(names))
            yield worker, clock
            engine.step()
            for stream in streams:
                await stream


@asynccontextmanager
async def attached(*names: str) -> AsyncIterator[tuple[Worker, grpc.aio.Channel, grpc.aio.UnaryStreamCall]]:
    """A worker, a channel to it, and the stream of a router "raw" on it whose tasks of three tokens run."""
    async with serving() as worker, raw_channel(worker.host.address) as channel:
        stream = attach(channel, "raw")
        assert (await stream.read()).deltas == [], "the greeting that says the session is open"
        for name in names:
            assert (await call(channel, "Submit", SubmitRequest("raw", make_task(name, max_tokens=3)))).accepted
        await eventually(lambda: worker.engine.running == set(names))
        yield worker, channel, stream


# --- the way of a task


async def test_a_task_streams_its_deltas_and_ends_with_one_that_says_why():
    async with serving(FakeEngine()) as worker:
        task = make_task(max_tokens=4)
        async with aclosing(task_deltas(worker.client, task)) as stream:
            deltas = [delta async for delta in stream]
        assert [delta.finished for delta in deltas] == [False, False, False, True]
        assert deltas[-1].finish_reason == "length"
        assert deltas[-1].timing is not None
        assert await worker.tokens(make_task("again", max_tokens=4)) == [d.token_ids[0] for d in deltas]


async def test_a_hand_off_crosses_the_wire_unchanged():
    async with serving(FakeEngine("prefill"), PrefillHandler()) as worker:
        async with aclosing(task_deltas(worker.client, make_task(leg="prefill"))) as stream:
            [delta] = [delta async for delta in stream]
        assert delta.handoff == make_handoff(delta.handoff.handoff_id, 3)


async def test_a_hand_off_whose_request_is_aborted_between_the_engines_last_step_and_the_worker_is_released():
    engine = FakeEngine("prefill")
    engine.output_delay = asyncio.Event()
    async with serving(engine, PrefillHandler()) as worker:
        stream = task_deltas(worker.client, make_task(leg="prefill"))
        first = asyncio.ensure_future(anext(stream))
        await eventually(lambda: engine.kept)  # the engine has finished: no abort of the request frees these blocks
        [handoff_id] = engine.kept
        first.cancel()
        await asyncio.wait((first,))
        await stream.aclose()
        await eventually(lambda: not engine.kept)
    assert engine.released == [handoff_id]


async def test_a_hand_off_that_was_told_is_the_routers_to_release():
    engine = FakeEngine("prefill")
    async with (
        serving(engine, PrefillHandler()) as worker,
        aclosing(task_deltas(worker.client, make_task(leg="prefill"))) as stream,
    ):
        assert [delta.handoff is not None async for delta in stream] == [True]
    assert engine.released == []


async def test_a_prompt_that_ends_without_a_hand_off_leaves_nothing_to_release():
    engine = FakeEngine("prefill")
    async with serving(engine, PrefillHandler()) as worker:
        await worker.tokens(make_task(leg="prefill", max_tokens=1))
        stop = SamplingParams(max_tokens=9, temperature=0.0, stop_token_ids=[next_token([5, 6, 7])])
        await worker.tokens(make_task("stops", leg="prefill", params=stop))
    assert engine.released == []


async def test_a_hand_off_in_the_outbox_of_a_router_that_has_gone_is_released():
    released: list[str] = []
    session = RouterSession(lambda handoff: released.append(handoff.handoff_id))
    session.send(TokenDelta(request_id="a", token_ids=[1]))
    session.send(TokenDelta(request_id="b", finished=True, handoff=make_handoff("unread")))
    session.close()
    session.send(TokenDelta(request_id="c", finished=True, handoff=make_handoff("late")))
    assert released == ["unread", "late"]


async def test_all_deltas_of_one_engine_step_arrive_in_one_batch():
    names = [f"r{number}" for number in range(12)]
    async with attached(*names) as (worker, _, stream):
        for _ in range(3):
            worker.engine.step()
            batch = await stream.read()
            assert sorted(delta.request_id for delta in batch.deltas) == sorted(names)


async def test_a_step_that_vllm_hands_out_in_portions_is_still_one_batch():
    names = [f"r{number}" for number in range(6)]
    async with attached(*names) as (worker, _, stream):
        for portion in (names[:2], names[2:4], names[4:]):  # vLLM lets the loop turn after every 128 outputs
            worker.engine.step(*portion)
            await asyncio.sleep(0)
        assert sorted(delta.request_id for delta in (await stream.read()).deltas) == names


async def test_each_router_gets_only_its_own_deltas():
    async with serving() as worker, connected(worker.host.address, "other") as other:
        mine = asyncio.create_task(worker.tokens(make_task("r", prompt_token_ids=[1], max_tokens=2)))
        theirs = Worker(worker.engine, worker.host, other)
        other_task = asyncio.create_task(theirs.tokens(make_task("r2", prompt_token_ids=[2], max_tokens=2)))
        await eventually(lambda: len(worker.engine.calls) == 2)
        worker.engine.step()
        worker.engine.step()
        assert [len(await mine), len(await other_task)] == [2, 2]
        assert await mine != await other_task


# --- what makes no sense


UNREADABLE = [b"", b"\xc1garbage", b"\x91" * 5000, b"\x93\x01\x02\x03", b"\xff" * 5000]
WRONG_FIELDS = [b"\x81\xa9router_id\xa2\xff\xfe", b"\x81\xa9router_id\x07"]
WITHOUT_FIELDS = ("Describe", "Status", "ResetPrefixCache")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (name, message)
        for name in (*METHODS, "Pair", "Offer")
        for message in UNREADABLE + (WRONG_FIELDS if name not in WITHOUT_FIELDS else [])
    ],
)
async def test_a_message_that_cannot_be_read_is_refused_as_the_callers_fault_and_harms_nothing(name, message):
    async with serving(FakeEngine()) as worker, raw_channel(worker.host.address) as channel:
        kind = channel.unary_stream if name == "Attach" else channel.unary_unary
        answer = kind(f"/{SERVICE}/{name}")(message, timeout=PATIENCE_S)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await (answer.read() if name == "Attach" else answer)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "unreadable" in refused.value.details()
        assert len(await worker.tokens(make_task())) == 3
        assert (await worker.client.status()).tasks == 0


async def test_fields_that_a_message_has_not_are_passed_over():
    async with serving(FakeEngine()) as worker, raw_channel(worker.host.address) as channel:
        for name in WITHOUT_FIELDS:
            assert await channel.unary_unary(f"/{SERVICE}/{name}")(WRONG_FIELDS[1], timeout=PATIENCE_S)


HOSTILE_SAMPLING = [
    {"max_tokens": 0},
    {"n": "x"},
    {"temperature": -1.0},
    {"\ud7ff": {}, "stop_token_ids": ["a"]},
    {"top_p": 7.0},
]


@pytest.mark.parametrize("handler", [DecodeHandler(), PrefillHandler()])
@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x81\xa4seed\xa2\xff\xfe", b"\x91" * 5000, *map(msgspec.msgpack.encode, HOSTILE_SAMPLING)]
)
async def test_sampling_parameters_that_make_no_sense_are_the_fault_of_that_request_only(data, handler):
    leg = "prefill" if isinstance(handler, PrefillHandler) else "decode"
    async with serving(FakeEngine(leg), handler) as worker:
        task = msgspec.structs.replace(make_task("bad", leg=leg), sampling=data)
        with pytest.raises(InvalidTask):
            await worker.tokens(task)
        assert len(await worker.tokens(make_task("good", leg=leg))) >= 1


async def test_a_task_without_a_prompt_is_invalid():
    async with serving(FakeEngine()) as worker:
        handoff = msgspec.structs.replace(make_handoff(), complete=False)
        with pytest.raises(InvalidTask, match="no prompt"):
            await worker.tokens(make_task(prompt_token_ids=[], handoff=handoff))


# --- aborting


async def test_closing_a_stream_early_cancels_the_engines_request():
    async with serving() as worker:
        async with aclosing(task_deltas(worker.client, make_task(max_tokens=50))) as stream:
            first = asyncio.create_task(anext(stream))
            await eventually(lambda: worker.engine.running)
            worker.engine.step()
            await first
        await eventually(lambda: worker.engine.aborted == ["r"])
        await eventually(lambda: not worker.engine.running)
        assert (await worker.client.status()).tasks == 0


async def test_a_task_that_ended_by_itself_is_not_aborted():
    async with serving(FakeEngine()) as worker:
        await worker.tokens(make_task())
        await worker.client.status()  # a later message of the same router, so an abort would have come
        assert worker.engine.aborted == []


async def test_aborting_an_unknown_request_or_router_is_harmless():
    async with serving(FakeEngine()) as worker, raw_channel(worker.host.address) as channel:
        assert (await call(channel, "Abort", AbortRequest("router", ["ghost"]))).accepted
        assert (await call(channel, "Abort", AbortRequest("stranger", ["ghost"]))).accepted
        assert len(await worker.tokens(make_task())) == 3


async def test_a_router_whose_stream_breaks_loses_all_its_tasks_and_nobody_elses():
    async with attached("a", "b") as (worker, _, stream):
        others = asyncio.create_task(worker.tokens(make_task("mine", max_tokens=1)))
        await eventually(lambda: worker.engine.running == {"a", "b", "mine"})
        stream.cancel()
        await eventually(lambda: sorted(worker.engine.aborted) == ["a", "b"])
        worker.engine.step()
        assert len(await others) == 1
        assert (await worker.client.status()).tasks == 0


class Flood:
    """A handler that makes more than any wire takes, until it is closed."""

    closed = False

    async def run(self, engine, task):
        try:
            while True:
                yield TokenDelta(request_id=task.request_id, token_ids=[1] * 100_000)
                await asyncio.sleep(0.001)
        finally:
            self.closed = True


async def test_a_router_that_stopped_reading_and_then_left_loses_its_tasks_too():
    flood = Flood()
    async with serving(handler=flood) as worker, raw_channel(worker.host.address) as channel:
        stream = attach(channel, "raw")
        await stream.read()
        await call(channel, "Submit", SubmitRequest("raw", make_task("slow")))
        await asyncio.sleep(0.01)  # the wire's window fills
        stream.cancel()
        await eventually(lambda: flood.closed)


async def test_attaching_again_under_the_same_name_ends_what_the_first_stream_asked_for():
    async with attached("old") as (worker, channel, first):
        second = attach(channel, "raw")
        await second.read()
        await eventually(lambda: worker.engine.aborted == ["old"])
        assert await first.read() == grpc.aio.EOF, "its reader learns that nothing more comes"
        await call(channel, "Submit", SubmitRequest("raw", make_task("new", max_tokens=1)))
        await eventually(lambda: worker.engine.running == {"new"})
        first.cancel()  # the old stream's end must not take the new session along
        await worker.client.status()
        worker.engine.step()
        [delta] = (await second.read()).deltas
        assert (delta.request_id, delta.finished) == ("new", True)


async def test_an_attach_that_its_router_has_given_up_and_that_arrives_last_leaves_no_stream_without_an_end():
    async with serving() as worker, raw_channel(worker.host.address) as channel:
        task = asyncio.create_task(worker.tokens(make_task("cut")))
        await eventually(lambda: worker.engine.running == {"cut"})
        late = attach(channel, "router")
        await late.read()
        with pytest.raises(WorkerLost, match="closed its stream"):
            await task
        late.cancel()
        await worker.client.wait_connected(PATIENCE_S)
        again = asyncio.create_task(worker.tokens(make_task("again", max_tokens=1)))
        await eventually(lambda: worker.engine.running == {"again"})
        worker.engine.step()
        assert len(await again) == 1


# --- broken connections


async def test_a_cut_wire_is_told_to_every_open_stream_and_the_client_comes_back_by_itself():
    async with serving() as worker:
        route = Route(worker.host.address)
        address = await route.start()
        async with connected(address, "far") as far:
            remote = Worker(worker.engine, worker.host, far)
            open_streams = [asyncio.create_task(remote.tokens(make_task(name))) for name in ("a", "b")]
            await eventually(lambda: worker.engine.running == {"a", "b"})
            route.cut("refused")
            for stream in open_streams:
                with pytest.raises(WorkerLost, match=address):
                    await stream
            assert not far.connected
            await eventually(lambda: sorted(worker.engine.aborted) == ["a", "b"])
            route.mend()
            await far.wait_connected(PATIENCE_S)
            again = asyncio.create_task(remote.tokens(make_task("c", max_tokens=1)))
            await eventually(lambda: worker.engine.running == {"c"})
            worker.engine.step()
            assert len(await again) == 1
        await route.close()


async def test_a_worker_that_dies_is_lost_to_its_streams_and_to_every_later_call():
    async with serving() as worker:
        stream = asyncio.create_task(worker.tokens(make_task()))
        await eventually(lambda: worker.engine.running)
        await worker.host.stop()
        with pytest.raises(WorkerLost):
            await stream
        assert worker.engine.closed
        assert not worker.client.connected
        with pytest.raises(WorkerLost):
            await worker.client.status()
        with pytest.raises(WorkerLost):
            await worker.tokens(make_task("late"))


async def test_a_task_for_a_worker_that_is_not_connected_is_refused_at_once_and_not_sent():
    async with serving() as worker:
        await worker.host.stop()
        await eventually(lambda: not worker.client.connected)
        sent = []
        worker.client._unary = lambda *args, **kwargs: sent.append(args)
        with pytest.raises(WorkerLost, match=r"127\.0\.0\.1"):
            await worker.tokens(make_task("early"))
        assert sent == []
        assert worker.client._tasks == {}


async def test_a_worker_that_is_not_there_is_lost_after_the_timeout_and_named():
    async with running_client("127.0.0.1:9") as client:
        with pytest.raises(WorkerLost, match=r"127\.0\.0\.1:9"):
            await client.wait_connected(0.01)


async def test_a_task_lost_between_its_acceptance_and_its_first_delta_is_aborted_on_the_worker():
    async with serving() as worker:
        stream = asyncio.create_task(worker.tokens(make_task()))
        await eventually(lambda: worker.engine.running)
        worker.client._lose("the stream broke and is back already")
        with pytest.raises(WorkerLost):
            await stream
        await eventually(lambda: worker.engine.aborted == ["r"])


# --- refusing and failing


CALLS = {
    "Status": Ack(),
    "ResetPrefixCache": Ack(),
    "Pair": PairRequest([]),
    "Submit": SubmitRequest("router", make_task()),
    "Offer": OfferRequest(make_task()),
    "Abort": AbortRequest("router", ["r"]),
    "Drain": DrainRequest(0.0),
    "LoadAdapter": LoadAdapter(name="sql", path="/sql"),
    "UnloadAdapter": UnloadAdapter(adapter=Adapter(name="sql", digest="v1", path="/sql"), after_s=0.0),
    "TakeRole": Role(mode="colocated", pool="colocated", max_num_seqs=1, max_num_batched_tokens=1),
}


@pytest.mark.parametrize("mistaken", [("decode-0", "an older one"), ("prefill-0", "i1")])
async def test_a_worker_does_nothing_that_is_meant_for_another_one_that_had_this_address(mistaken):
    async with serving() as worker, raw_channel(worker.host.address) as channel:
        meant = ((MEANT, encode(Meant(*mistaken))),)
        calls = [call(channel, name, message, meant) for name, message in CALLS.items()]
        for asked in (attach(channel, "raw", meant).read(), *calls):
            with pytest.raises(grpc.aio.AioRpcError, match="this is decode-0, incarnation i1, not") as refused:
                await asked
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert worker.host.failure() == ""
        assert not worker.engine.running
        assert worker.engine.step_limits is None
        assert not worker.engine.unloaded


# --- what its cache has


async def test_a_router_is_offered_what_the_cache_has_of_a_prompt_and_of_what_its_client_has():
    async with serving(FakeEngine()) as worker:
        adapter = Adapter(name="sql", digest="v1", path="/sql")
        task = make_task(leg="prefill", emitted_token_ids=[8], cache_salt="a", adapter=adapter)
        assert await worker.client.offer(task, PATIENCE_S) is None
        worker.engine.cached_tokens = 2
        offered = await worker.client.offer(task, PATIENCE_S)
        assert (offered.num_tokens, offered.adapter) == (2, adapter.key), "a prefill worker takes only its task's KV"
        assert worker.engine.asked == [([5, 6, 7, 8], "a", adapter)] * 2
        assert await worker.client.offer(make_task(prompt_token_ids=[]), PATIENCE_S) is None
        worker.engine.error = EngineFailed("it is gone")
        assert await worker.client.offer(task, PATIENCE_S) is None


@pytest.mark.parametrize("leaves", [asyncio.CancelledError, WorkerLost])
async def test_an_offer_that_comes_too_late_or_to_nobody_is_unclaimed(leaves):
    async with serving(FakeEngine()) as worker:
        unclaimed = []
        worker.client._on_unclaimed = unclaimed.append
        worker.engine.cached_tokens, worker.engine.offers = 2, asyncio.Event()
        asking = asyncio.create_task(worker.client.offer(make_task(), 0.1 if leaves is WorkerLost else PATIENCE_S))
        await eventually(lambda: worker.engine.asked)
        if leaves is asyncio.CancelledError:
            asking.cancel()
        with pytest.raises(leaves):
            await asking
        worker.engine.offers.set()
        await eventually(lambda: unclaimed)
        assert unclaimed[0].num_tokens == 2


async def test_what_a_router_had_asked_for_that_is_gone_is_released_by_the_worker():
    async with serving(FakeEngine()) as worker:
        worker.engine.offers = asyncio.Event()
        async with connected(worker.host.address, "other") as other:
            asking = asyncio.create_task(other.offer(make_task(), PATIENCE_S))
            await eventually(lambda: worker.engine.asked)
        with pytest.raises(WorkerLost):
            await asking
        await eventually(lambda: len(worker.engine.released) == 1)


@pytest.mark.usefixtures("settles_quickly")
async def test_a_worker_that_leaves_offers_nothing():
    async with serving(FakeEngine()) as worker:
        worker.engine.cached_tokens = 2
        worker.host.drain(5.0)
        assert await worker.client.offer(make_task(), PATIENCE_S) is None
        assert worker.engine.asked == []


@pytest.mark.usefixtures("settles_quickly")
async def test_what_a_client_wants_of_one_worker_is_not_done_by_another_that_took_over_its_port(monkeypatch):
    engine = FakeEngine()
    lost = WorkerHost(engine, HANDLERS)
    address = await lost.start()
    async with asyncio.timeout(PATIENCE_S), connected(address) as client:
        await client.identify(PATIENCE_S)
        await lost.stop()
        await eventually(lambda: not client.connected)
        engine = FakeEngine()
        engine.config = replace(engine.config, worker_id="decode-7", incarnation="i7")
        other = WorkerHost(engine, HANDLERS)
        monkeypatch.setattr("ridgeline.worker_runtime.host.join_host_port", lambda *_: address)
        await other.start()
        try:
            wishes = {
                "describe": client.describe,
                "status": client.status,
                "pair": lambda: client.pair([]),
                "take_role": lambda: client.take_role(CALLS["TakeRole"]),
                "drain": lambda: client.drain(0.0),
                "reset_prefix_cache": client.reset_prefix_cache,
            }
            for name, wish in wishes.items():
                with pytest.raises(WorkerLost) as refused:
                    await refused_by(other, wish)
                assert "this is decode-7, incarnation i7, not decode-0, incarnation i1" in str(refused.value), name
            await eventually(lambda: "this is decode-7" in client._why_lost)
            assert other.failure() == ""
        finally:
            await other.stop()


async def refused_by(host, wish):
    """Ask until the channel has connected to the process that has the port now."""
    while True:
        try:
            return await wish()
        except WorkerLost as error:
            if "UNAVAILABLE" not in str(error):
                raise
        await asyncio.sleep(0.05)


async def test_a_call_that_does_not_say_readably_for_whom_it_is_is_refused():
    async with serving() as worker, raw_channel(worker.host.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="unreadable") as refused:
            await call(channel, "Drain", DrainRequest(0.0), ((MEANT, b"\xc1"),))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert worker.host.failure() == ""


async def test_a_connection_that_was_refused_is_tried_again_soon_and_not_later_and_later():
    tries = []

    async def refuse(reader, writer):
        tries.append(writer)
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server, running_client(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"):
        # Six take gRPC a quarter of a minute by itself, the next six a quarter of an hour.
        await eventually(lambda: len(tries) >= 6, 12)


@pytest.mark.usefixtures("settles_quickly")
async def test_a_draining_worker_takes_no_new_task_and_finishes_the_running_ones():
    async with serving() as worker:
        stream = asyncio.create_task(worker.tokens(make_task(max_tokens=1)))
        await eventually(lambda: worker.engine.running)
        await worker.client.drain(5)
        assert (await worker.client.status()).draining
        assert worker.host.failure() == "draining"
        with pytest.raises(TaskRejected, match=r"decode-0 is draining"):
            await worker.tokens(make_task("new"))
        worker.engine.step()
        assert len(await stream) == 1
        await worker.host.drain()
        assert worker.host.failure() == "drained"
        assert worker.engine.aborted == []


async def test_what_has_not_ended_when_the_time_for_draining_is_up_is_cut_off_after_its_tokens_and_says_why():
    async with serving() as worker:
        async with aclosing(task_deltas(worker.client, make_task(max_tokens=9))) as stream:
            first = asyncio.ensure_future(anext(stream))
            await eventually(lambda: worker.engine.running)
            worker.engine.step()
            assert len((await first).token_ids) == 1
            await worker.client.drain(0.01)
            with pytest.raises(WorkerDraining, match=r"decode-0 is draining"):
                await anext(stream)
        assert worker.engine.aborted == ["r"]


@pytest.mark.usefixtures("settles_quickly")
async def test_a_drain_that_has_begun_can_be_shortened_and_not_lengthened():
    async with serving() as worker:
        stream = asyncio.create_task(worker.tokens(make_task(max_tokens=9)))
        await eventually(lambda: worker.engine.running)
        await worker.client.drain(86_400)
        await eventually(lambda: worker.host._patience is not None)
        await worker.client.drain(0.05)
        await worker.client.drain(86_400)
        with pytest.raises(WorkerDraining):
            await stream
        await worker.client.drain(0.0)
        await eventually(lambda: worker.host.failure() == "drained")


@pytest.mark.usefixtures("settles_quickly")
async def test_a_worker_is_drained_only_once_nobody_needs_its_kv_blocks_any_more():
    async with serving() as worker:
        worker.engine.stats.counters = {"open_leases": 1.0, "pinned_blocks": 3.0}
        drained = worker.host.drain(0.0)
        await asyncio.sleep(0.6)
        assert worker.host.failure() == "draining"
        worker.engine.stats.counters = {"open_leases": 0.0, "pinned_blocks": 0.0}
        await drained
        assert worker.host.failure() == "drained"


@pytest.mark.usefixtures("settles_quickly")
async def test_a_lease_that_nobody_ends_holds_a_draining_worker_for_its_time_only(monkeypatch):
    monkeypatch.setattr("ridgeline.worker_runtime.host.LEASE_MARGIN_S", 0.0)
    stats = FakeStats(counters={"open_leases": 1.0})
    async with asyncio.timeout(PATIENCE_S):
        await kv_unneeded(stats, lease_s=0.1)


async def test_an_engine_that_dies_while_it_drains_has_left():
    async with serving() as worker:
        worker.engine.stats.counters = {"open_leases": 1.0}
        worker.host.drain(0.0)
        worker.engine.failed = True
        assert worker.host.failure() == "drained"


async def test_an_engine_with_work_and_without_steps_counts_as_stalled_until_it_moves():
    async with watched() as (worker, clock):
        clock.now_s += 1000.0
        engine = worker.engine
        assert worker.host.failure() == "", "idle is not stalled"
        stream = asyncio.create_task(worker.tokens(make_task(max_tokens=1)))
        await eventually(lambda: engine.running)
        assert (await worker.client.status()).stalled_s == 0.0, "the time before its first work does not count"
        clock.now_s += 59.0
        assert (worker.host.failure(), (await worker.client.status()).stalled_s) == ("", 59.0)
        clock.now_s += 1.0
        assert worker.host.failure() == "stalled"
        engine.stats.stall.moved()
        assert worker.host.failure() == ""
        engine.step()
        await stream
        assert (await worker.client.status()).stalled_s == 0.0


@pytest.mark.parametrize(("does", "found_after_s"), [("nothing", 9.0), ("computes", 20.0), ("waits", 60.0)])
async def test_an_engine_with_work_that_makes_no_step_is_found_according_to_what_it_does(does, found_after_s):
    async with watched("r") as (worker, clock):
        clock.now_s += 3.0
        worker.engine.stats.stall.moved()
        worker.engine.stats.stall.foretold(0.1)
        worker.engine.does = does
        looks = 0
        while not worker.host.failure():
            clock.now_s += HEALTH_LOOK_S
            worker.host._looked_s = asyncio.get_running_loop().time() - HEALTH_LOOK_S
            worker.host._look_at_engine()
            looks += 1
        found_s = pytest.approx(found_after_s, abs=2 * HEALTH_LOOK_S)
        assert (worker.host.failure(), looks * HEALTH_LOOK_S) == ("stalled", found_s)


async def test_a_worker_that_stood_still_itself_does_not_blame_its_engine():
    async with watched("r") as (worker, clock):
        worker.engine.does = "nothing"
        clock.now_s += 3600.0  # the whole machine did
        worker.host._looked_s -= 3600.0
        assert worker.host.failure() == ""
        worker.host._look_at_engine()
        assert worker.host.failure() == ""


async def test_tasks_whose_router_is_gone_count_as_work_until_they_end():
    async with watched() as (worker, clock), connected(worker.host.address, "another") as other:
        stream = asyncio.create_task(anext(task_deltas(other, make_task())))
        await eventually(lambda: worker.engine.running)
        clock.now_s += 70.0
        worker.host._sessions.pop("another").abort(["r"])
        assert worker.host.failure() == "stalled"
        await eventually(lambda: not worker.host._tasks)
        assert worker.host.failure() == "stalled", "it has not moved"
        stream.cancel()


async def test_a_worker_that_has_no_stream_of_this_router_is_lost_to_it_and_not_draining():
    async with serving() as worker:
        worker.host._sessions.clear()
        with pytest.raises(WorkerLost, match="has no stream of this router: attach a stream first"):
            await worker.tokens(make_task())


async def test_a_rejected_task_is_not_aborted_since_it_never_began():
    async with serving() as worker, raw_channel(worker.host.address) as channel:
        ack = await call(channel, "Submit", SubmitRequest("never-attached", make_task()))
        assert (ack.accepted, ack.reason) == (False, "attach a stream first")
        assert worker.engine.calls == []


@pytest.mark.parametrize("pool", ["prefill", "decode", "colocated"])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_worker_runs_every_leg_whatever_the_pool_it_was_started_for(pool, leg):
    async with serving(FakeEngine(pool)) as worker:
        assert await worker.tokens(make_task(leg=leg))
        assert len(worker.engine.calls) == 1


async def test_a_role_sets_the_limits_of_the_engines_steps_and_is_what_the_next_router_is_told():
    role = Role(
        mode="colocated", pool="colocated", max_num_seqs=9, max_num_batched_tokens=300, step_target_s=0.07, number=4
    )
    async with serving() as worker:
        assert ((await worker.client.describe()).role, (await worker.client.status()).role_number) == (None, 0)
        await worker.client.take_role(role)
        await eventually(lambda: worker.engine.step_limits == (9, 300))
        assert worker.engine.step_target_s == 0.07
        assert ((await worker.client.describe()).role, (await worker.client.status()).role_number) == (role, 4)


async def test_a_status_tells_how_long_steps_take_once_enough_of_them_have_been_seen():
    model = StepModel(
        base_s=0.05,
        per_prefill_token_s=0.004,
        per_sequence_s=0.001,
        per_context_token_s=1e-6,
        per_attended_token_s=1e-6,
        corrections=(1.0, 1.1),
        error=0.03,
        steps=MIN_FITTED_STEPS - 1,
    )
    async with serving() as worker:
        assert (await worker.client.status()).step_model is None
        worker.engine.stats.step_model = model
        assert (await worker.client.status()).step_model is None
        worker.engine.stats.step_model = known = msgspec.structs.replace(model, steps=MIN_FITTED_STEPS)
        assert (await worker.client.status()).step_model == known


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (InvalidTask("too long"), InvalidTask, "^too long$"),
        (EngineFailed("it is gone"), EngineFailed, "^it is gone$"),
        (RuntimeError("unforeseen"), EngineFailed, "^RuntimeError: unforeseen$"),
        (KeyError("x"), EngineFailed, "KeyError"),
    ],
)
async def test_an_error_of_the_engine_reaches_the_client_as_what_it_is(error, kind, message):
    engine = FakeEngine()
    engine.error = error
    async with serving(engine) as worker:
        with pytest.raises(kind, match=message):
            await worker.tokens(make_task())
        engine.error = None
        assert len(await worker.tokens(make_task("next"))) == 3, "one bad task does not harm the next"
        assert (await worker.client.status()).tasks == 0


async def test_only_what_was_computed_shows_that_a_worker_makes_progress():
    engine = FakeEngine()
    engine.error = EngineFailed("the step failed")
    async with serving(engine) as worker:
        with pytest.raises(EngineFailed):
            await worker.tokens(make_task())
        assert worker.client.last_token_s is None
        engine.error = None
        before_s = time.monotonic()
        await worker.tokens(make_task("next"))
        assert before_s <= worker.client.last_token_s <= time.monotonic()


async def test_a_method_that_does_not_exist_is_an_error():
    async with serving(FakeEngine()) as worker, raw_channel(worker.host.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary(f"/{SERVICE}/Nonsense")(b"", timeout=PATIENCE_S)


class Babbler:
    """A worker of another version: attaches properly, then says what nobody understands."""

    async def __aenter__(self) -> str:
        self.server = grpc.aio.server()

        async def stream(request, context):
            yield encode(StepBatch([]))
            yield b"\xc1"
            yield encode(StepBatch([TokenDelta(request_id="r")]))

        async def unary(request, context):
            return b"\xc1"

        handlers = {name: grpc.unary_unary_rpc_method_handler(unary) for name in METHODS}
        handlers["Attach"] = grpc.unary_stream_rpc_method_handler(stream)
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        return f"127.0.0.1:{port}"

    async def __aexit__(self, *args: object) -> None:
        await self.server.stop(grace=None)


async def test_answers_that_make_no_sense_lose_the_worker_and_do_not_end_the_router():
    async with Babbler() as address, connected(address) as client:
        with pytest.raises(WorkerLost, match="makes no sense"):
            await client.status()
        await eventually(lambda: not client.connected)


# --- what a worker says about itself


async def test_a_worker_describes_itself_and_its_state():
    engine = FakeEngine()
    engine.stats.running, engine.stats.waiting, engine.stats.kv_usage = 3, 2, 0.25
    engine.stats.counters = {"steps_total.decode": 5.0}
    engine.config = replace(engine.config, rack="r7", device="cores 3")
    async with serving(engine) as worker:
        description = await worker.client.describe()
        assert (description.worker_id, description.incarnation, description.pool) == ("decode-0", "i1", "decode")
        assert (description.rack, description.device) == ("r7", "cores 3")
        assert (description.layout, description.transfer_addresses) == (LAYOUT, ["127.0.0.1:7001"])
        assert (description.num_kv_blocks, description.prefix_block_tokens) == (100, 32)
        status = await worker.client.status()
        assert (status.running, status.waiting, status.kv_blocks_free, status.kv_blocks_total) == (3, 2, 75, 100)
        assert status.counters == {"steps_total.decode": 5.0}
        assert await worker.client.reset_prefix_cache() is True


async def test_a_failed_engine_shows_on_its_host():
    async with serving(FakeEngine()) as worker:
        assert worker.host.failure() == ""
        worker.engine.failed = True
        assert worker.host.failure() == "engine_died"


async def test_a_handoff_that_nobody_claims_any_more_is_given_to_the_owner_for_release():
    unclaimed = []
    client = WorkerClient("127.0.0.1:9", "router", unclaimed.append)
    offered = make_handoff("h", 3)
    client._unclaimed(TokenDelta(request_id="gone", finished=True, handoff=offered))
    client._unclaimed(TokenDelta(request_id="gone", finished=True))
    await client.close()
    assert unclaimed == [offered]


# --- what is too long for a message, and a router that does not read


class Handler:
    """Sends what it is told to, then as many small deltas as there are steps."""

    def __init__(self, first: TokenDelta, small: int = 0) -> None:
        self.first, self.small = first, small
        self.closed = 0

    async def run(self, engine, task):
        try:
            yield msgspec.structs.replace(self.first, request_id=task.request_id)
            for number in range(self.small):
                yield TokenDelta(request_id=task.request_id, token_ids=[number], finished=number == self.small - 1)
        finally:
            self.closed += 1


async def test_a_batch_is_cut_by_bytes_and_nothing_is_lost_or_out_of_order(monkeypatch):
    monkeypatch.setattr("ridgeline.worker_runtime.host.MAX_BATCH_BYTES", 1000)
    session = RouterSession(lambda handoff: None)
    for number in range(100):
        session.send(TokenDelta(request_id="r", token_ids=[number] * (2000 if number == 50 else 30)))
    batches = []
    while session.outbox_bytes:
        batches.append(encode(await session.next_batch()))
    read = [decoder(StepBatch)(batch).deltas for batch in batches]
    assert [delta.token_ids[0] for deltas in read for delta in deltas] == list(range(100))
    assert all(len(data) <= 1010 or len(deltas) == 1 for data, deltas in zip(batches, read, strict=True))
    assert session.outbox_bytes == 0


async def test_a_delta_longer_than_a_message_is_its_own_requests_error_and_ends_no_stream():
    long = TokenDelta(request_id="", token_ids=[1 << 31] * 7_000_000, handoff=make_handoff(), finished=True)
    handler = Handler(long)
    async with serving(handler=handler) as worker:
        unclaimed = []
        worker.client._on_unclaimed = unclaimed.append
        with pytest.raises(InvalidTask, match="ask for fewer logprobs"):
            await worker.tokens(make_task("long"))
        assert unclaimed == [make_handoff()], "its hand-off is given back at once"
        handler.first = TokenDelta(request_id="", token_ids=[7], finished=True)
        assert await worker.tokens(make_task("short")) == [7]
        assert worker.client.connected
        assert handler.closed == 2


async def test_tasks_of_a_router_that_does_not_read_end_when_the_outbox_is_full(monkeypatch):
    monkeypatch.setattr("ridgeline.worker_runtime.host.MAX_OUTBOX_BYTES", 1000)
    session = RouterSession(lambda handoff: None)
    small = TokenDelta(request_id="a", token_ids=[1])
    while session.outbox_bytes + len(encode(small)) <= 1000:
        session.send(small)
    with pytest.raises(Undeliverable):
        session.send(small)
    assert 900 < session.outbox_bytes < 1300
    session.fail("b", "x" * 10_000, "engine")
    deltas = decoder(StepBatch)(encode(await session.next_batch())).deltas
    assert [delta.request_id for delta in deltas if delta.finished] == ["a", "b"]
    assert "has not read the last" in deltas[-2].error
    session.send(TokenDelta(request_id="c", token_ids=[1]))
    assert session.outbox_bytes < 100, "there is room again once it has read"


async def test_what_a_router_had_not_read_when_it_came_back_is_released_at_once():
    engine = FakeEngine("prefill", stepping="manual")
    host = WorkerHost(engine, HANDLERS)
    await host.start()
    try:
        former, again = host._attach(AttachRequest("r")), host._attach(AttachRequest("r"))
        await anext(former)
        await host._submit(SubmitRequest("r", make_task("t", leg="prefill")))
        await eventually(lambda: engine.running)
        engine.step()
        await eventually(lambda: host._sessions["r"].outbox_bytes)
        await anext(again)  # and nobody has noticed that the former connection is gone
        assert (len(engine.released), engine.kept) == (1, set())
        await former.aclose()
        assert len(engine.released) == 1
    finally:
        await again.aclose()
        await host.stop()
