"""The mode changes while requests are served: what runs ends where it is, what waits goes another way."""

import asyncio

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from vllm.sampling_params import SamplingParams

from ridgeline.contracts.workers import Role
from ridgeline.router.dispatch.modes import OwnModes
from ridgeline.router.dispatch.orchestrator import Orchestrator
from ridgeline.router.dispatch.request import SequenceRequest
from ridgeline.router.fleet.pairing import PairingRefused
from ridgeline.router.fleet.roles import ModeImpossible, RoleTable
from ridgeline.router.front.sampling import sampling_of
from ridgeline.router.observe.metrics import RequestMetrics
from ridgeline.router.placement.cluster_state import ClusterState
from ridgeline.router.placement.places import own_placement
from tests.support.patience import PATIENCE_S, eventually
from tests.support.samples import LAYOUT, router_settings, worker_description
from tests.support.small_fleet import a_fleet, hosts


def role(mode, pool, seqs, tokens):
    return Role(mode=mode, pool=pool, max_num_seqs=seqs, max_num_batched_tokens=tokens)


ROLES = RoleTable(
    "disaggregated",
    {
        "disaggregated": {
            "prefill-0": role("disaggregated", "prefill", 4, 512),
            "decode-0": role("disaggregated", "decode", 80, 512),
        },
        "colocated": {name: role("colocated", "colocated", 72, 2048) for name in ("prefill-0", "decode-0")},
        "adaptive": {name: role("adaptive", "adaptive", 80, 512) for name in ("prefill-0", "decode-0")},
    },
)
DESCRIPTION = worker_description(worker_id="decode-0", pool="decode", layout=LAYOUT)
LAYOUTS = {"prefill": LAYOUT, "decode": LAYOUT}


class Serving:
    """A router's inner half over two workers with fake engines."""

    def __init__(self, started, fleet):
        self.engines = [host._engine for host in started]
        self.fleet = fleet
        settings = router_settings()
        state = ClusterState(fleet, settings)
        self.queues = state.queues
        self.modes = OwnModes(fleet, state.mode_changed)
        self.metrics = RequestMetrics(CollectorRegistry())
        placement = own_placement(state, fleet, settings)
        self.orchestrator = Orchestrator(placement, settings, self.metrics, lambda handoff, after_s: None)
        self.number = 0

    def ask(self, tokens=5):
        self.number += 1
        sent = []
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        request = SequenceRequest(f"r{self.number}", list(range(70)), sampling_of(params), reasoning_ended=True)
        return sent, asyncio.create_task(self.orchestrator.run(request, lambda delta: sent.extend(delta.token_ids)))

    @property
    def pools(self):
        return {worker.worker_id: worker.pool for worker in self.fleet.workers}


async def test_a_change_gives_every_worker_its_role_and_the_limits_of_its_steps():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = Serving(started, fleet)
        await eventually(lambda: [engine.step_limits for engine in serving.engines] == [(4, 512), (80, 512)])
        change = await serving.modes.change("colocated")
        assert (change.mode, serving.modes.mode, change.rerouted_prompts) == ("colocated", "colocated", 0)
        assert serving.pools == {"prefill-0": "colocated", "decode-0": "colocated"}
        assert [engine.step_limits for engine in serving.engines] == [(72, 2048)] * 2
        assert fleet.get("prefill-0").max_num_seqs == 72
        await serving.modes.change("disaggregated")
        assert serving.pools == {"prefill-0": "prefill", "decode-0": "decode"}
        assert [engine.step_limits for engine in serving.engines] == [(4, 512), (80, 512)]


async def test_requests_are_answered_before_during_and_after_changes():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving, answers = Serving(started, fleet), []
        for mode in ("colocated", "disaggregated", "adaptive", "colocated", "adaptive", "disaggregated"):
            answers += [serving.ask() for _ in range(10)]
            await serving.modes.change(mode)
        answers += [serving.ask() for _ in range(10)]
        await asyncio.gather(*(ending for _, ending in answers))
        assert [len(sent) for sent, _ in answers] == [5] * 70
        assert all(worker.outstanding.running == 0 for worker in fleet.workers)


async def test_what_runs_when_the_mode_changes_ends_on_its_worker():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = Serving(started, fleet)
        for engine in serving.engines:
            engine._stepping = "manual"
        prefill, decode = serving.engines
        sent, ending = serving.ask(3)
        await eventually(lambda: prefill.running)
        await serving.modes.change("colocated")
        prefill.step()
        await eventually(lambda: decode.running)
        await serving.modes.change("disaggregated")
        decode.step()
        await eventually(lambda: len(sent) == 2)
        await serving.modes.change("colocated")
        decode.step()
        await ending
        assert len(sent) == 3
        assert (len(prefill.calls), len(decode.calls)) == (1, 1)


async def test_prompts_that_wait_for_a_pool_that_no_longer_serves_go_another_way():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = Serving(started, fleet)
        with fleet.get("prefill-0").reserve(10**6):
            waiting = [serving.ask() for _ in range(5)]
            await eventually(lambda: serving.queues["prefill"].waiting == 5)
            change = await serving.modes.change("colocated")
            assert change.rerouted_prompts == 5
            await asyncio.gather(*(ending for _, ending in waiting))
        assert [len(sent) for sent, _ in waiting] == [5] * 5
        assert len(serving.engines[1].calls) == 5, "the other worker had room"


async def test_who_waits_for_a_worker_in_doubt_of_a_pool_that_is_gone_does_not_wait_for_it_any_longer():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = Serving(started, fleet)
        fleet.get("decode-0").client.failed_s = float("inf")
        sent, ending = serving.ask()
        await asyncio.sleep(0)
        await serving.modes.change("colocated")
        await ending
        assert len(sent) == 5


async def test_a_mode_that_is_impossible_is_refused_with_the_reason_and_nothing_changes():
    fixed = RoleTable("disaggregated", why_not={"colocated": "fixed_mode is set"})
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), fixed) as fleet:
        serving = Serving(started, fleet)
        with pytest.raises(ModeImpossible, match="fixed_mode is set"):
            await serving.modes.change("colocated")
        assert serving.modes.mode == "disaggregated"
        assert [engine.step_limits for engine in serving.engines] == [None, None], "they keep their own limits"


async def test_workers_whose_kv_does_not_fit_together_stay_whole_replicas():
    other = msgspec.structs.replace(LAYOUT, num_layers=LAYOUT.num_layers + 1)
    roles = RoleTable("colocated", ROLES.by_mode)
    async with (
        asyncio.timeout(PATIENCE_S),
        hosts(prefill=LAYOUT, decode=other) as started,
        a_fleet(addresses(started), roles) as fleet,
    ):
        with pytest.raises(PairingRefused, match="cannot exchange KV"):
            await fleet.change_mode("disaggregated")
        assert (fleet.mode, {worker.pool for worker in fleet.workers}) == ("colocated", {"colocated"})


async def test_a_router_that_is_started_again_finds_the_mode_that_its_workers_were_in():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started:
        async with a_fleet(addresses(started), ROLES) as fleet:
            await fleet.change_mode("colocated")
        async with a_fleet(addresses(started), ROLES) as fleet:
            assert (fleet.mode, {worker.pool for worker in fleet.workers}) == ("colocated", {"colocated"})
            await fleet.change_mode("disaggregated")
        async with a_fleet(addresses(started), ROLES) as fleet:
            assert fleet.mode == "disaggregated"


async def test_a_worker_that_was_away_when_the_mode_changed_gets_its_role_with_its_next_answer(monkeypatch):
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        away = fleet.get("decode-0")
        await fleet.refresh()
        status = away.client.status

        async def silent():
            await asyncio.Event().wait()

        monkeypatch.setattr(away.client, "status", silent)
        changing = asyncio.create_task(fleet.change_mode("colocated"))
        await eventually(lambda: fleet.mode == "colocated")
        assert started[1]._engine.step_limits == (80, 512)
        changing.cancel()
        monkeypatch.setattr(away.client, "status", status)
        away._question.cancel()
        await eventually(lambda: started[1]._engine.step_limits == (72, 2048))


async def test_a_new_incarnation_gets_the_role_of_the_mode_and_not_of_the_pool_it_was_started_for():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        await fleet.change_mode("colocated")
        async with hosts(decode=LAYOUT) as [again]:
            await fleet.replace(again.address, "actor_died")
            assert fleet.get("decode-0").pool == "colocated"
            assert again._engine.step_limits == (72, 2048)
            assert fleet.kv_pairs == []


def test_the_newest_role_wins_and_one_of_another_deployment_does_not_count():
    def worker(number, mode):
        return msgspec.structs.replace(
            DESCRIPTION, role=msgspec.structs.replace(ROLES.by_mode[mode]["decode-0"], number=number)
        )

    workers = [worker(3, "disaggregated"), worker(4, "colocated"), DESCRIPTION]
    newest = ROLES.newest(workers)
    assert newest is not None
    assert (newest.mode, newest.number) == ("colocated", 4)
    assert RoleTable("disaggregated").newest([worker(4, "colocated")]) is None


def addresses(started):
    return [host.address for host in started]


async def test_what_a_worker_does_is_counted_under_the_pool_it_is_in_at_the_time():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        engine, worker = started[1]._engine, fleet.get("decode-0")
        for mode, counted in (("colocated", 3.0), ("disaggregated", 10.0), ("colocated", 15.0)):
            engine.stats.counters = {"steps_total.decode": counted}
            await fleet.refresh()
            await fleet.change_mode(mode)
        assert worker.counted["decode"]["steps_total.decode"] == 8.0
        assert worker.counted["colocated"]["steps_total.decode"] == 7.0


async def test_a_worker_in_a_long_step_takes_its_role_after_it_and_answers_meanwhile():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        await eventually(lambda: all(worker.has_its_role for worker in fleet.workers))
        engine, step_ends = started[1]._engine, asyncio.Event()
        set_at_once = engine.limit_steps

        async def after_the_step(*limits):
            await step_ends.wait()
            await set_at_once(*limits)

        engine.limit_steps = after_the_step
        changing = asyncio.create_task(fleet.change_mode("colocated"))
        await eventually(lambda: fleet.get("prefill-0").has_its_role)
        await fleet.refresh()
        assert fleet.get("decode-0").takes_work
        assert not changing.done()
        step_ends.set()
        await changing
        assert engine.step_limits == (72, 2048)
