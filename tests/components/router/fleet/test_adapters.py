"""LoRA adapters on all workers: loaded on all or on none, replaced and unloaded while requests run."""

import asyncio

import pytest

from ridgeline.contracts.errors import AdapterRefused
from ridgeline.router.fleet.adapters import OwnAdapters
from ridgeline.worker_runtime.host import WorkerHost
from tests.support.cut_route import Route
from tests.support.fake_engine import FakeEngine
from tests.support.patience import PATIENCE_S, eventually
from tests.support.samples import LAYOUT, engine_config
from tests.support.small_fleet import a_fleet, hosts

PATH = "/adapters/sql"
AFTER_S = 30.0


def engines(started):
    return [host._engine for host in started]


def put(started, *digests, path=PATH):
    """Have each worker's node have these files; "": none."""
    for engine, digest in zip(engines(started), digests, strict=True):
        engine.adapter_digests[path] = digest


@pytest.fixture
async def pair():
    """A fleet's adapters, and its prefill and decode worker with the same files."""
    async with asyncio.timeout(PATIENCE_S), hosts(prefill=LAYOUT, decode=LAYOUT) as started:
        put(started, "v1", "v1")
        async with a_fleet([host.address for host in started]) as fleet:
            yield OwnAdapters(fleet, ("m",), AFTER_S), fleet, started


async def test_an_adapter_is_on_all_workers_before_requests_can_choose_it(pair):
    adapters, _, started = pair
    seen = []
    adapters.on_change(lambda: seen.append(({*adapters.known}, [set(engine.adapters) for engine in engines(started)])))
    await adapters.load("sql", PATH, in_place=False)
    assert seen == [(set(), [set(), set()]), ({"sql"}, [{"sql@v1"}] * 2)]
    with pytest.raises(AdapterRefused, match="load_inplace"):
        await adapters.load("sql", PATH, in_place=False)


@pytest.mark.parametrize(("digests", "named"), [(("v1", ""), "decode-0"), (("v1", "v2"), "differ.*prefill-0 v1.*v2")])
async def test_an_adapter_that_a_worker_lacks_or_has_otherwise_is_left_on_none(pair, digests, named):
    adapters, _, started = pair
    put(started, *digests)
    with pytest.raises(AdapterRefused, match=named):
        await adapters.load("sql", PATH, in_place=False)
    assert not adapters.known
    assert [set(engine.adapters) for engine in engines(started)] == [set(), set()]
    left = {after_s for engine in engines(started) for _, after_s in engine.unloaded}
    assert left == {AFTER_S}, "requests may run with it"


async def test_a_replaced_adapter_stays_on_workers_for_as_long_as_a_request_may_run(pair):
    adapters, _, started = pair
    await adapters.load("sql", PATH, in_place=False)
    put(started, "v2", "v2")
    await adapters.load("sql", PATH, in_place=True)
    assert adapters.known["sql"].digest == "v2"
    assert [engine.unloaded for engine in engines(started)] == [[("sql@v1", AFTER_S)]] * 2
    await adapters.load("sql", PATH, in_place=True)  # the same files again
    assert await adapters.unload("sql")
    assert not await adapters.unload("sql")
    assert not adapters.known
    assert [engine.unloaded for engine in engines(started)] == [[("sql@v1", AFTER_S), ("sql@v2", AFTER_S)]] * 2


async def test_a_failed_replacement_leaves_the_former_one(pair):
    adapters, _, started = pair
    await adapters.load("sql", PATH, in_place=False)
    put(started, "v1", "")
    with pytest.raises(AdapterRefused):
        await adapters.load("sql", PATH, in_place=True)
    assert [set(engine.adapters) for engine in engines(started)] == [{"sql@v1"}] * 2
    assert adapters.known["sql"].digest == "v1"


async def newcomer(digest: str) -> WorkerHost:
    engine = FakeEngine("decode")
    engine.config = engine_config("decode", "decode-7")
    engine.adapter_digests[PATH] = digest
    host = WorkerHost(engine, {})
    await host.start()
    return host


@pytest.mark.parametrize(("digest", "loaded"), [("v1", {"sql@v1"}), ("v2", set())])
async def test_a_worker_that_comes_later_takes_in_what_the_others_have_first_or_gets_no_requests_for_it(
    pair, digest, loaded
):
    adapters, fleet, _ = pair
    await adapters.load("sql", PATH, in_place=False)
    host = await newcomer(digest)
    try:
        await fleet.replace(host.address, None)
        assert set(host._engine.adapters) == fleet.get("decode-7").adapters.loaded == loaded
    finally:
        await host.stop()


async def test_a_router_that_is_started_again_learns_from_the_workers_which_there_are(pair):
    adapters, fleet, started = pair
    await adapters.load("sql", PATH, in_place=False)
    first, second = engines(started)
    del second.adapters["sql@v1"]
    async with a_fleet([host.address for host in started]) as again:
        assert again.adapters == fleet.adapters
        assert set(second.adapters) == set(first.adapters) == {"sql@v1"}
        seconds = OwnAdapters(again, ("m",), AFTER_S)
        await seconds.load_first([{"name": "sql", "path": "/elsewhere"}])  # the name is taken already
        assert seconds.known["sql"].path == PATH


CHAT = "/adapters/chat"


async def test_an_adapter_loaded_while_a_worker_takes_in_the_others_comes_to_it_too(pair):
    adapters, fleet, started = pair
    await adapters.load("sql", PATH, in_place=False)
    put(started, "v1", "v1", path=CHAT)
    host = await newcomer("v1")
    engine, began, may_go = host._engine, asyncio.Event(), asyncio.Event()
    engine.adapter_digests[CHAT] = "v1"
    at_once = engine.load_adapter

    async def slowly(*asked):
        began.set()
        await may_go.wait()
        return await at_once(*asked)

    engine.load_adapter = slowly
    try:
        replacing = asyncio.create_task(fleet.replace(host.address, None))
        await began.wait()
        await adapters.load("chat", CHAT, in_place=False)
        may_go.set()
        await replacing
        assert set(engine.adapters) == fleet.get("decode-7").adapters.loaded == {"sql@v1", "chat@v1"}
    finally:
        await host.stop()


@pytest.fixture
async def behind_a_route():
    """The same as `pair`, and the route to the decode worker, which can be cut."""
    async with asyncio.timeout(PATIENCE_S), hosts(prefill=LAYOUT, decode=LAYOUT) as started:
        put(started, "v1", "v1")
        route = Route(started[1].address)
        try:
            async with a_fleet([started[0].address, await route.start()]) as fleet:
                yield OwnAdapters(fleet, ("m",), AFTER_S), fleet, started, route
        finally:
            await route.close()


async def cut(fleet, route):
    route.cut("refused")
    await eventually(lambda: not fleet.get("decode-0").client.connected)


async def test_a_worker_that_was_out_of_reach_takes_in_what_was_loaded_meanwhile(behind_a_route):
    adapters, fleet, started, route = behind_a_route
    await cut(fleet, route)
    await adapters.load("sql", PATH, in_place=False)
    route.mend()
    await eventually(lambda: fleet.get("decode-0").client.connected)
    await eventually(lambda: set(engines(started)[1].adapters) == {"sql@v1"}, 10.0)


async def test_a_worker_that_was_out_of_reach_brings_no_adapter_back(behind_a_route):
    adapters, fleet, started, route = behind_a_route
    await adapters.load("sql", PATH, in_place=False)
    await cut(fleet, route)
    await adapters.unload("sql")
    route.mend()
    await eventually(lambda: fleet.get("decode-0").client.connected)
    await eventually(lambda: not engines(started)[1].adapters, 10.0)
    async with a_fleet([host.address for host in started]) as again:
        assert not again.adapters


async def test_a_router_that_is_started_again_serves_without_what_can_no_longer_be_loaded(pair):
    adapters, *_ = pair
    modules = [{"name": "gone", "path": "/gone"}, {"name": "sql", "path": PATH}]
    with pytest.raises(AdapterRefused):
        await adapters.load_first(modules)
    await adapters.load_first(modules, again=True)
    assert {*adapters.known} == {"sql"}


async def test_a_router_that_is_started_again_has_the_adapters_of_its_configuration_unloaded_ones_too(pair):
    adapters, _, started = pair
    modules = [{"name": "sql", "path": PATH}]
    await adapters.load_first(modules)
    await adapters.unload("sql")
    async with a_fleet([host.address for host in started]) as again:
        seconds = OwnAdapters(again, ("m",), AFTER_S)
        await seconds.load_first(modules, again=True)
        assert [*seconds.known] == ["sql"]
