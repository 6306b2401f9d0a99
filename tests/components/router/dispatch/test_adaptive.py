"""Mode `adaptive` over two workers with fake engines and real gRPC: who gets what, and what becomes of its limits."""

import asyncio
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
from ridgeline.router.fleet.adaptive import Wanted
from ridgeline.router.fleet.corrections import MOST
from ridgeline.router.fleet.prediction import idle_prompt_s
from ridgeline.router.flow.learned import Learned
from ridgeline.router.flow.placement import LocalPlacement
from ridgeline.router.flow.prompt_queue import prompt_queues
from ridgeline.router.front.health import HealthProbe
from ridgeline.router.front.sampling import sampling_of
from ridgeline.router.observe.metrics import RequestMetrics
from tests.components.router.dispatch.test_modes import LAYOUTS, ROLES, addresses
from tests.support.patience import PATIENCE_S, eventually
from tests.support.samples import next_token, router_settings
from tests.support.small_fleet import a_fleet, hosts
from tests.unit.router.fleet import test_shape as shape

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
        self.learned = learned = Learned(32, settings.router.rebalance)
        self.queues = prompt_queues(fleet, settings, learned)
        self.registry = CollectorRegistry()
        self.placement = placement = LocalPlacement(fleet, self.queues, settings, learned)
        self.metrics = RequestMetrics(self.registry)
        self.orchestrator = Orchestrator(fleet, placement, settings, self.metrics, lambda handoff, after_s: None)
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


async def test_the_second_answer_joins_the_first_and_its_prompt_is_computed_elsewhere():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet)
        await serving.learn()
        limits = {"ttft_limit_s": 10.0, "tpot_limit_s": 0.2}
        first = serving.ask(120, **limits)
        await eventually(lambda: sum(len(engine.running) for engine in serving.engines) == 1)
        decoder = next(engine for engine in serving.engines if engine.running)
        other = next(engine for engine in serving.engines if engine is not decoder)
        decoder.step()
        await eventually(lambda: first[0])
        another = [token + 1 for token in PROMPT]
        second = serving.ask(120, another, **limits)
        await eventually(lambda: other.running)
        decodes_on = next(one for one in fleet.workers if serving.engine_of(one) is decoder)
        assert (decodes_on.outstanding.decoding, decodes_on.outstanding.decodes) == (1, 2)
        other.step()
        await eventually(lambda: second[0])
        assert decodes_on.outstanding.decoding == 2, "from its first token on, though the worker has not stepped"
        await eventually(lambda: len(decoder.running) == 2)
        assert not other.running
        await asyncio.gather(serving.step_until(first[1]), serving.step_until(second[1]))
        assert (first[0], second[0]) == (expected(120), expected(120, another))
        assert serving.decisions() == {("whole", "within_limits"): 1, ("split", "within_limits"): 1}
        for told, request_id in zip(serving.metrics.explanations.latest(10), ("r2", "r1"), strict=True):
            assert (told.request_id, told.outcome, told.ttft_limit_s) == (request_id, "finished", 10.0)
            assert (told.prompt_tokens, told.output_tokens, told.placements) == (len(PROMPT), 120, 1)
            assert told.costs[0] == pytest.approx(min(told.costs), abs=0.1)
        assert all(worker.outstanding == type(worker.outstanding)() for worker in fleet.workers), "nothing stays held"


def keep_one_for_prompts(rebalancer):
    """Have one of two workers favour prefill, by traffic that it is told of and that came long ago."""
    for second in range(100):
        rebalancer.placed(Wanted(512, 64, 5 * shape.PROMPT_S, 1.3 * shape.STEP_S), float(second))
        if rebalancer.due(float(second)):
            rebalancer.read(float(second), shape.fleet(2))
    assert rebalancer.prefill_workers(2) == 1


async def test_once_workers_favour_a_phase_requests_are_split_between_them_and_the_workers_say_it():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet, rebalance="act")
        await serving.learn()
        keep_one_for_prompts(serving.learned.rebalancer)
        for number in range(3):
            prompt = [token + 100 * number for token in PROMPT]
            sent, ending = serving.ask(3, prompt)
            await serving.step_until(ending)
            assert sent == expected(3, prompt)
        assert serving.decisions()[("split", "least_latency")] >= 2, "the first is placed before the favours are told"
        assert sorted(worker.favours for worker in fleet.workers) == ["decode", "prefill"]
        await fleet.change_mode("colocated")
        assert [worker.favours for worker in fleet.workers] == [None, None]


async def test_a_division_of_the_workers_does_not_outlive_a_change_of_mode():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet, rebalance="act")
        await serving.learn()
        keep_one_for_prompts(serving.learned.rebalancer)
        _, ending = serving.ask(3)
        await serving.step_until(ending)
        assert sorted(worker.favours for worker in fleet.workers) == ["decode", "prefill"]
        for mode in ("colocated", "adaptive"):
            await fleet.change_mode(mode)
        _, ending = serving.ask(3, [token + 100 for token in PROMPT])
        await serving.step_until(ending)
        assert [worker.favours for worker in fleet.workers] == [None, None]
        assert not serving.learned.rebalancer.divides


async def test_the_rebalancer_is_told_of_limits_within_reach_and_of_who_kept_their_own(monkeypatch):
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet, rebalance="act")
        await serving.learn()
        placed, kept = [], []
        rebalancer = serving.learned.rebalancer
        monkeypatch.setattr(rebalancer, "placed", lambda wanted, _, cached_tokens: placed.append(wanted))
        monkeypatch.setattr(rebalancer, "answered", lambda *, within_limits: kept.append(within_limits))
        for limit_s in (1e-6, 60.0):
            _, ending = serving.ask(3, ttft_limit_s=limit_s, tpot_limit_s=limit_s)
            await serving.step_until(ending)
        assert kept == [False, True]
        absurd, honest = placed
        assert absurd.ttft_limit_s == idle_prompt_s(MODEL, len(PROMPT))
        assert absurd.tpot_limit_s == MODEL.decode_s(1, absurd.context_tokens)
        assert (honest.ttft_limit_s, honest.tpot_limit_s) == (60.0, 60.0)


async def test_a_prompt_that_is_too_short_for_a_hand_off_is_not_split():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet, min_remote_prefill_tokens=1000)
        await serving.learn()
        asked = [serving.ask(3, [token + 100 * number for token in PROMPT]) for number in range(4)]
        await asyncio.gather(*(serving.step_until(ending) for _, ending in asked))
        assert serving.decisions() == {("whole", "least_latency"): 4}


async def test_the_engine_gets_the_limit_on_tpot_in_this_mode_alone():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet)
        await serving.learn()
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
            serving.learned.answered(400, 300)
        probe = HealthProbe(serving.orchestrator, 1000, prompt_tokens=40)
        for _ in range(64):
            await probe()
        assert [serving.learned.output_tokens(longest) for longest in (0, 400)] == [300.0, 300.0]
        assert [serving.learned.sure_tokens(longest) for longest in (0, 400)] == [300.0, 300.0]
        assert serving.learned.prefixes.workers == serving.learned.corrections.workers == 0


async def test_prompts_are_hashed_only_while_the_mode_is_adaptive(monkeypatch):
    hashed = []
    block_hashes = ridgeline.router.dispatch.request.block_hashes
    monkeypatch.setattr(
        ridgeline.router.dispatch.request,
        "block_hashes",
        lambda *prompt: hashed.append(prompt) or block_hashes(*prompt),
    )
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = Serving(started, fleet)
        for mode in ("disaggregated", "colocated", "adaptive", "colocated"):
            await fleet.change_mode(mode)
            hashed.clear()
            await serving.answer(3)
            assert bool(hashed) == (mode == "adaptive"), mode


async def test_what_passes_outside_of_the_engine_is_learned_and_predicted_for_the_next_prompt():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet)
        await serving.learn()
        in_engine = LegTiming(queue_s=0.0, first_token_s=1e-4, compute_s=1e-4)
        for engine in serving.engines:
            engine.timing = in_engine
        for _ in range(5):
            await serving.answer(3)
        *seen, last = reversed(serving.metrics.explanations.latest(5))
        outside_s = [one.ttft_s - one.placed_after_s - in_engine.first_token_s for one in seen]
        assert last.options[0].outside_s == pytest.approx(median(outside_s))
        assert last.options[0].ttft_s > last.placed_after_s + last.options[0].outside_s


async def test_what_a_prompt_took_corrects_what_is_predicted_for_the_next_one():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started, a_fleet(addresses(started), ROLES) as fleet:
        serving = await adaptive(started, fleet)
        for engine in serving.engines:
            engine.stats.step_model = replace(MODEL, base_s=1e-6, per_prefill_token_s=1e-6, per_sequence_s=0.0)
        await fleet.refresh()
        for _ in range(4):
            await serving.answer(3)
        ratios = [serving.learned.corrections.ratio(worker.worker_id, beside=False) for worker in fleet.workers]
        assert max(ratios) == pytest.approx(MOST, rel=0.1), "no prompt takes 70 us"
