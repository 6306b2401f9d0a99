"""Mode `adaptive` over two workers with fake engines and real gRPC: who gets what, and what becomes of its limits."""

import asyncio
import json
from statistics import median

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from vllm.sampling_params import SamplingParams

import ridgeline.router.dispatch.request
from ridgeline.contracts.tasks import LegTiming
from ridgeline.contracts.workers import StepModel
from ridgeline.engine.request.sampling import SURE_TOKENS, TPOT_LIMIT
from ridgeline.router.dispatch.orchestrator import Orchestrator
from ridgeline.router.dispatch.request import SequenceRequest
from ridgeline.router.fleet.request_route import Demand
from ridgeline.router.front.health import HealthProbe
from ridgeline.router.front.sampling import sampling_of
from ridgeline.router.observe.metrics import RequestMetrics
from ridgeline.router.placement.cluster_state import ClusterState
from ridgeline.router.placement.learned import Learned
from ridgeline.router.placement.places import own_placement
from ridgeline.router.scheduler.offline_simulation import recorded
from ridgeline.router.scheduler.recorded_events import read_recording
from ridgeline.router.scheduler.replay import replay
from ridgeline.router.settings import PolicyConfig
from ridgeline.router.watching import Comparing, Wanted
from tests.components.router.dispatch.test_modes import LAYOUTS, ROLES, addresses
from tests.support.patience import PATIENCE_S, eventually
from tests.support.samples import next_token, router_settings
from tests.support.small_fleet import a_fleet, hosts

MODEL = StepModel(
    base_s=0.04,
    per_prefill_token_s=0.02,
    per_sequence_s=0.002,
    per_context_token_s=1e-6,
    per_attended_token_s=1e-7,
    steps=100,
)
PROMPT = list(range(70))


def expected(tokens, prompt=PROMPT):
    context = list(prompt)
    for _ in range(tokens):
        context.append(next_token(context))
    return context[len(prompt) :]


class Serving:
    """A router's inner half in mode adaptive; its engines make a step only when told."""

    def __init__(self, started, fleet, **overrides):
        self.engines = [host._engine for host in started]
        for engine in self.engines:
            engine._stepping = "manual"
        self.fleet = fleet
        settings = router_settings(**overrides)
        self.learned = learned = Learned()
        self.comparing = Comparing(fleet, learned, settings.router)
        self.policy = self.comparing.policy
        self.state = ClusterState(fleet, settings, learned, self.policy)
        self.queues = self.state.queues
        self.registry = CollectorRegistry()
        self.placement = placement = own_placement(self.state, fleet, settings)
        self.metrics = RequestMetrics(self.registry)
        self.orchestrator = Orchestrator(placement, settings, self.metrics, lambda handoff, after_s: None)
        self.number = 0

    def engine_of(self, worker):
        return next(engine for engine in self.engines if engine.config.worker_id == worker.worker_id)

    async def learn(self):
        for engine in self.engines:
            engine.stats.step_model = MODEL
        await self.fleet.refresh()

    def ask(self, tokens=5, prompt=PROMPT, **limits):
        self.number += 1
        sent = []
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        request = SequenceRequest(f"r{self.number}", list(prompt), sampling_of(params), reasoning_ended=True, **limits)
        return sent, asyncio.create_task(self.orchestrator.run(request, lambda delta: sent.extend(delta.token_ids)))

    async def step_until(self, ending):
        while not ending.done():
            for engine in self.engines:
                engine.step()
            await asyncio.sleep(0.001)
        await ending

    async def answer(self, tokens):
        _, ending = self.ask(tokens)
        await self.step_until(ending)

    def decisions(self):
        counted = (sample for family in self.registry.collect() for sample in family.samples)
        return {
            (one.labels["choice"], one.labels["reason"]): one.value
            for one in counted
            if one.name == "ridgeline_decisions_total"
        }


async def adaptive(started, fleet, **overrides):
    await fleet.change_mode("adaptive")
    return Serving(started, fleet, **overrides)


async def test_before_any_steps_are_known_requests_go_whole_to_the_least_loaded_worker():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet)
        asked = [serving.ask(), serving.ask()]
        await eventually(lambda: [len(engine.running) for engine in serving.engines] == [1, 1])
        await asyncio.gather(*(serving.step_until(ending) for _, ending in asked))
        assert [sent for sent, _ in asked] == [expected(5)] * 2
        assert serving.decisions() == {}


async def test_requests_are_split_while_a_policy_serves_that_divides_the_workers():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet)
        await serving.learn()
        serving.policy.serve_by("1 of 2 for prefill")
        limits = {"ttft_limit_s": 10.0, "tpot_limit_s": 0.2}
        sent, ending = serving.ask(120, **limits)
        await serving.step_until(ending)
        assert sent == expected(120)
        assert serving.decisions() == {("split", "in_shape"): 1}
        [told] = serving.metrics.ended.latest(10)
        assert (told.decision.policy, told.outcome, told.ttft_limit_s) == ("1 of 2 for prefill", "finished", 10.0)
        assert (told.prompt_tokens, told.output_tokens, told.placements) == (len(PROMPT), 120, 1)
        assert all(worker.outstanding == type(worker.outstanding)() for worker in fleet.workers), "nothing stays held"


async def test_policies_are_compared_by_what_was_served_and_the_workers_say_what_they_are_for():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet, rebalance="act")
        await serving.learn()
        comparing = asyncio.create_task(serving.comparing.run())
        serving.policy.serve_by("1 of 2 for prefill")
        for number in range(8):
            _, ending = serving.ask(3, [token + 100 * number for token in PROMPT], ttft_limit_s=9.0, tpot_limit_s=1.0)
            await serving.step_until(ending)
        await eventually(lambda: serving.policy.scores)
        assert {"colocated", "colocated, paced", "1 of 2 for prefill"} <= {*serving.policy.scores}
        serving.policy.serve_by("1 of 2 for prefill")
        serving.comparing.tell_affinities()
        assert sorted(worker.favours for worker in fleet.workers) == ["decode", "prefill"]
        await fleet.change_mode("colocated")
        assert [worker.favours for worker in fleet.workers] == [None, None]
        comparing.cancel()


async def test_a_worker_that_has_to_do_both_phases_while_the_other_is_away_is_not_said_to_be_for_one():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet)
        await serving.learn()
        serving.policy.serve_by("1 of 2 for prefill")
        serving.comparing.tell_affinities()
        assert sorted(worker.favours for worker in fleet.workers) == ["decode", "prefill"]
        await fleet.workers[0].client.drain(PATIENCE_S)
        await eventually(lambda: not fleet.workers[0].usable)
        _, ending = serving.ask(3)
        await serving.step_until(ending)
        serving.comparing.tell_affinities()
        assert [worker.favours for worker in fleet.workers] == [None, None]


async def test_what_came_in_another_mode_counts_as_soon_as_policies_are_compared():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = Serving(started, fleet)
        await fleet.change_mode("colocated")
        await serving.learn()
        for _ in range(8):
            await serving.answer(3)
        await serving.comparing.look()
        assert serving.policy.scores == {}
        await fleet.change_mode("adaptive")
        await serving.comparing.look()
        assert serving.policy.scores


async def test_a_recording_has_what_was_asked_decided_and_answered_and_is_decided_again():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet)
        await serving.learn()
        lines = []

        async def record():
            async for some in serving.comparing.record(Wanted(60.0, 1 << 20)):
                lines.append(some)  # noqa: PERF401 - others look at it meanwhile

        recording = asyncio.create_task(record())
        await eventually(lambda: lines)
        for _ in range(8):
            await serving.answer(3)
        await serving.comparing.look()
        await fleet.change_mode("colocated")
        await eventually(lambda: b'"type":"mode"' in lines[-1])
        recording.cancel()
        await asyncio.wait((recording,))
        events = [*read_recording(b"".join(lines).splitlines(keepends=True), "it")]
        made = replay(events)
        assert (made.placements, made.comparisons, made.differences) == (8, 1, [])
        known = recorded(events)
        assert {(one.prompt_tokens, one.output_tokens) for one in known.requests} == {(70, 3)}
        assert all(one.ttft_s > 0 and one.tpot_s >= 0 for one in known.requests)
        assert [worker.worker_id for worker in known.fleet.workers] == ["prefill-0", "decode-0"]
        assert known.policies[-1] == "colocated"
        assert not serving.learned.traffic.listeners


@pytest.mark.parametrize(
    ("wanted", "why"), [(Wanted(0.3, 1 << 20), "the time is over"), (Wanted(60.0, 10), "the limit of bytes")]
)
async def test_a_recording_ends_when_it_is_long_or_large_enough_and_says_which(wanted, why):
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet)
        lines = [some async for some in serving.comparing.record(wanted)]
        assert json.loads(lines[-1])["reason"] == why


async def test_a_policy_that_is_set_serves_always_and_the_workers_say_what_they_are_for():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        policy = PolicyConfig(name="threshold", options={"split_above_tokens": 50})
        serving = await adaptive(started, fleet, policy=policy)
        await serving.learn()
        asked = [serving.ask(3, list(range(number, number + tokens))) for number, tokens in enumerate([40] * 8 + [70])]
        await asyncio.gather(*(serving.step_until(ending) for _, ending in asked))
        await serving.comparing.look()
        assert serving.decisions() == {("whole", "short_prompt"): 8, ("split", "in_shape"): 1}
        assert serving.policy.scores == {}
        assert sorted(worker.favours for worker in fleet.workers) == ["decode", "prefill"]


async def test_a_prompt_that_is_too_short_for_a_hand_off_is_not_split():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet, min_remote_prefill_tokens=1000)
        await serving.learn()
        serving.policy.serve_by("1 of 2 for prefill")
        asked = [serving.ask(3, [token + 100 * number for token in PROMPT]) for number in range(4)]
        await asyncio.gather(*(serving.step_until(ending) for _, ending in asked))
        assert serving.decisions() == {("whole", "short_prompt"): 4}


async def test_the_engine_gets_the_limit_on_tpot_in_this_mode_alone():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet)
        await serving.learn()
        serving.policy.serve_by("colocated, paced")
        for mode in ("colocated", "adaptive", "disaggregated"):
            await fleet.change_mode(mode)
            _, ending = serving.ask(3, tpot_limit_s=0.2)
            await serving.step_until(ending)
        limits = [call.params.extra_args or {} for engine in serving.engines for call in engine.calls]
        [limited] = [one for one in limits if TPOT_LIMIT in one]
        assert limited[TPOT_LIMIT] == 0.2
        assert limited[SURE_TOKENS] == 3.0, "as the answer before it"


async def test_a_worker_that_dies_loses_no_answer():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet)
        await serving.learn()
        sent, ending = serving.ask(10)
        await eventually(lambda: sum(len(engine.running) for engine in serving.engines) == 1)
        at = next(index for index, engine in enumerate(serving.engines) if engine.running)
        serving.engines[at].step()
        await eventually(lambda: sent)
        await started[at].stop()
        await serving.step_until(ending)
        assert sent == expected(10)


async def test_a_prompt_that_a_worker_has_is_computed_there_until_caches_are_emptied():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet)
        await serving.learn()
        await serving.answer(3)
        had = next(engine for engine in serving.engines if engine.calls)
        for _ in range(3):
            await serving.answer(3)
        assert len(had.calls) == 4
        with next(worker for worker in fleet.workers if serving.engine_of(worker) is had).reserve(30):
            await serving.answer(3)
            assert len(had.calls) == 5, "6 tokens are computed sooner than 70, though it has others before"
            serving.placement.forget_prefixes()
            await serving.answer(3)
            assert len(had.calls) == 5


async def test_what_a_worker_had_is_forgotten_once_it_is_removed():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet)
        await serving.learn()
        await serving.answer(3)
        prefixes = serving.learned.prefixes
        had = next(worker.worker_id for worker in fleet.workers if prefixes.blocks_of(worker.worker_id))
        await fleet.remove(had)
        for _ in range(2):  # the first one makes another worker known, the second finds one too many
            await serving.answer(3)
        assert prefixes.blocks_of(had) == 0
        assert prefixes.workers == len(fleet.workers) == 1


async def test_without_prefix_routing_a_prompt_goes_where_there_is_less_to_do_whoever_has_it():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet, prefix_routing=False)
        await serving.learn()
        await serving.answer(3)
        had = next(engine for engine in serving.engines if engine.calls)
        with next(worker for worker in fleet.workers if serving.engine_of(worker) is had).reserve(5):
            await serving.answer(3)
        assert len(had.calls) == 1


async def test_sequences_of_one_prompt_that_come_together_go_where_the_first_one_is_computed():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet)
        await serving.learn()
        asked = [serving.ask(2) for _ in range(4)]
        await eventually(lambda: sum(len(engine.calls) for engine in serving.engines) == 4)
        assert sorted(len(engine.calls) for engine in serving.engines) == [0, 4]
        await asyncio.gather(*(serving.step_until(ending) for _, ending in asked))


async def test_a_model_that_says_that_decoding_takes_no_time_ends_no_request():
    """As an engine's did that had only computed prompts: the next choice divided by the time of its steps."""
    one_prompt_each = {"prefill": 1, "decode": 1, "colocated": 1, "adaptive": 1}
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet, prefill_window_tokens=one_prompt_each)
        for engine in serving.engines:
            engine.stats.step_model = replace(MODEL, base_s=0.0, per_sequence_s=0.0, per_context_token_s=0.0)
        await fleet.refresh()
        asked = [serving.ask(5) for _ in range(3)]  # the third waits until the first token of one of the others
        for _, ending in asked:
            await serving.step_until(ending)
        assert [sent for sent, _ in asked] == [expected(5)] * 3
        assert sum(serving.decisions().values()) == 3


async def test_probes_teach_nothing():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet)
        for engine in serving.engines:
            engine._stepping = "auto"
        await serving.learn()
        for _ in range(80):
            serving.learned.answered(Demand(1, 400), 300)
        probe = HealthProbe(serving.orchestrator, 1000, prompt_tokens=40)
        for _ in range(64):
            await probe()
        assert [serving.learned.output_tokens(longest) for longest in (0, 400)] == [300.0, 300.0]
        assert [serving.learned.sure_tokens(longest) for longest in (0, 400)] == [300.0, 300.0]
        assert serving.learned.prefixes.workers == 0


@pytest.mark.parametrize("prefix_routing", [True, False])
async def test_prompts_are_hashed_in_every_mode_unless_prefix_routing_is_off(monkeypatch, prefix_routing):
    hashed = []
    block_hashes = ridgeline.router.dispatch.request.block_hashes
    monkeypatch.setattr(
        ridgeline.router.dispatch.request,
        "block_hashes",
        lambda *prompt: hashed.append(prompt) or block_hashes(*prompt),
    )
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = Serving(started, fleet, prefix_routing=prefix_routing)
        for mode in ("disaggregated", "colocated", "adaptive"):
            await fleet.change_mode(mode)
            hashed.clear()
            await serving.answer(3)
            assert bool(hashed) is prefix_routing, mode


async def test_what_passes_outside_of_the_engine_is_learned_and_predicted_for_the_next_prompt():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet)
        await serving.learn()
        in_engine = LegTiming(queue_s=0.0, first_token_s=1e-4, compute_s=1e-4)
        for engine in serving.engines:
            engine.timing = in_engine
        for _ in range(5):
            await serving.answer(3)
        *seen, last = reversed(serving.metrics.ended.latest(5))
        overhead_s = [one.ttft_s - one.decision.placed_after_s - in_engine.first_token_s for one in seen]
        assert serving.learned.overhead_s == pytest.approx(median([*overhead_s, overhead_s[0]]), abs=max(overhead_s))
        assert last.decision.predicted_ttft_s > last.decision.placed_after_s + min(overhead_s)
