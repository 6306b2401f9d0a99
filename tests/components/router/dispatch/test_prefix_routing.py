"""A later turn goes to the worker that has its beginning, in the fixed modes: fake engines, real gRPC."""

import asyncio

import pytest

from ridgeline.router.fleet.roles import RoleTable
from tests.components.router.dispatch.test_adaptive import PROMPT, Serving, expected
from tests.components.router.dispatch.test_modes import addresses, role
from tests.components.router.shared.test_several_routers import all_is_given_back
from tests.support.patience import PATIENCE_S
from tests.support.samples import LAYOUT, router_settings
from tests.support.several_routers import a_dispatcher, routers
from tests.support.small_fleet import a_fleet, hosts

LAYOUTS = dict.fromkeys(("prefill", "prefill_1", "decode", "decode_1"), LAYOUT)
PREFILL, DECODE = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
ALL = PREFILL + DECODE
ROLES = RoleTable(
    "disaggregated",
    {
        "disaggregated": {name: role("disaggregated", name.split("-")[0], 80, 512) for name in ALL},
        "colocated": {name: role("colocated", "colocated", 80, 512) for name in ALL},
    },
)
MODES = pytest.mark.parametrize(
    ("mode", "short", "pools"),
    [
        ("colocated", 0, [ALL]),
        ("disaggregated", 0, [PREFILL, DECODE]),
        ("disaggregated", 1000, [DECODE]),
    ],
    ids=["colocated", "disaggregated", "decode_only"],
)


async def served(serving, prompt, busy=()):
    """Serve a turn; return its workers. `busy` workers decode an answer meanwhile."""
    before = {engine.config.worker_id: len(engine.calls) for engine in serving.engines}
    held = [serving.fleet.get(name).reserve(decode_context_tokens=10) for name in busy]
    sent, ending = serving.ask(5, prompt)
    await serving.step_until(ending)
    for one in held:
        one.close()
    assert sent == expected(5, prompt)
    return {
        engine.config.worker_id for engine in serving.engines if len(engine.calls) > before[engine.config.worker_id]
    }


@MODES
@pytest.mark.parametrize("prefix_routing", [True, False])
async def test_a_later_turn_goes_where_its_beginning_is_unless_prefix_routing_is_off(
    mode, short, pools, prefix_routing
):
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        await fleet.change_mode(mode)
        serving = Serving(started, fleet, prefix_routing=prefix_routing, min_remote_prefill_tokens=short)
        firsts, lasts = {pool[0] for pool in pools}, {pool[-1] for pool in pools}
        had = await served(serving, PROMPT, busy=[name for pool in pools for name in pool[:-1]])
        assert had == lasts, "the others had more to do"
        turn = [*PROMPT, *expected(5), *range(30)]
        assert await served(serving, turn) == (lasts if prefix_routing else firsts)
        assert await served(serving, list(range(500, 570))) == firsts, "nobody has this one"
        serving.placement.forget_prefixes()
        assert await served(serving, turn) == firsts
        assert bool(serving.learned.prefixes.workers) is prefix_routing


async def test_a_worker_that_was_started_again_has_nothing():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        await fleet.change_mode("colocated")
        serving = Serving(started, fleet)
        assert await served(serving, PROMPT, busy=ALL[:-1]) == {ALL[-1]}
        async with hosts(decode_1=LAYOUT) as again:
            await fleet.replace(again[0].address, "actor_died")
            assert await served(serving, PROMPT) == {ALL[0]}


async def test_what_one_of_several_routers_sent_somewhere_the_others_know():
    settings = router_settings(routers=2, roles={"colocated": ROLES.by_mode["colocated"]}, mode="colocated")
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started:
        at = [host.address for host in started]
        calls = {host._engine.config.worker_id: host._engine.calls for host in started}
        async with a_dispatcher(at, settings) as (dispatcher, address), routers(2, at, address, settings) as pair:
            held = [dispatcher.fleet.get(name).reserve() for name in ALL[:-1]]
            await pair[0].ask()[1]
            for one in held:
                one.close()
            await all_is_given_back(dispatcher)
            await pair[1].ask()[1]
            assert [name for name in ALL if calls[name]] == [ALL[-1]]
