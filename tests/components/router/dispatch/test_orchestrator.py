"""The way of a request through fake workers: order, hand-offs, reservations, outcomes."""

import asyncio
import time

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from vllm.sampling_params import SamplingParams

from ridgeline.contracts.errors import EngineFailed, HandoffLost, InvalidTask, TaskRejected, WorkerDraining, WorkerLost
from ridgeline.contracts.handoff import TransferResult
from ridgeline.contracts.tasks import TokenDelta
from ridgeline.contracts.workers import WorkerStatus
from ridgeline.engine.request import sampling
from ridgeline.router.dispatch.legs import ABORT_FIRST_S, CannotContinue
from ridgeline.router.dispatch.orchestrator import (
    MAX_FRUITLESS_RETRIES,
    MAX_LOSSES,
    DeadlineExceeded,
    Orchestrator,
)
from ridgeline.router.dispatch.request import SequenceRequest
from ridgeline.router.fleet.fleet import Fleet, Worker
from ridgeline.router.fleet.request_route import NoWorker
from ridgeline.router.fleet.roles import RoleTable
from ridgeline.router.front.sampling import sampling_of
from ridgeline.router.observe.metrics import RequestMetrics
from ridgeline.router.placement.cluster_state import ClusterState
from ridgeline.router.placement.places import own_placement
from tests.support.patience import PATIENCE_S, eventually
from tests.support.samples import LAYOUT, TIMING, make_handoff, router_settings, worker_description

PROMPT = list(range(70))
HANDOFF = make_handoff()
FIRST = TokenDelta(request_id="r", token_ids=[1], finished=True, handoff=HANDOFF, timing=TIMING)
WHOLE = TokenDelta(request_id="r", token_ids=[1], finished=True, finish_reason="stop", timing=TIMING)
SECOND = TokenDelta(request_id="r", token_ids=[2])
LAST = TokenDelta(request_id="r", token_ids=[3], finished=True, finish_reason="length", timing=TIMING)
FOREVER = "waits until it is closed"


@pytest.fixture(autouse=True)
def no_pause_between_attempts(monkeypatch):
    monkeypatch.setattr("ridgeline.router.dispatch.orchestrator.RETRY_PAUSE_S", 0.0)


class FakeClient:
    """Plays a script of deltas, exceptions and FOREVER for every task."""

    def __init__(self, log, name, script):
        self.connected, self.failed_s = True, float("-inf")
        self.tasks, self.closed_early, self.script = [], 0, script
        self._log, self._name = log, name

    async def run_task(self, task, on_delta):
        self.tasks.append(task)
        self._log.append(f"{self._name} asked")
        ended = False
        try:
            for step in self.script:
                await asyncio.sleep(0)
                if step is FOREVER:
                    await asyncio.Event().wait()
                if isinstance(step, Exception):
                    ended = True
                    raise step
                ended = step.finished
                if on_delta(step):
                    break
        finally:
            self.closed_early += not ended


class FakeFleet(Fleet):
    """A fleet without connections."""

    def __init__(self, log, scripts, mode="disaggregated"):
        super().__init__("test", roles=RoleTable(mode))
        for worker_id, script in scripts.items():
            description = worker_description(worker_id=worker_id, pool=worker_id.split("-")[0], layout=LAYOUT)
            self._workers[worker_id] = Worker(FakeClient(log, worker_id, script), description)

    async def refresh(self):
        pass


class Bench:
    """An orchestrator over fake workers, and everything that came out of it."""

    def __init__(self, mode="disaggregated", deadline_s=PATIENCE_S, min_remote=0, **scripts):
        self.log, self.emitted, self.released = [], [], []
        self.stop_at = None
        names = {"prefill": "prefill-0", "decode": "decode-0", "colocated": "colocated-0"}
        self.fleet = FakeFleet(self.log, {names.get(name, name): script for name, script in scripts.items()}, mode)
        self.registry = CollectorRegistry()
        self.settings = router_settings(
            mode=mode, request_timeout_s=deadline_s, min_remote_prefill_tokens=min_remote, recovery_timeout_s=0.0
        )
        metrics = self.metrics = RequestMetrics(self.registry)
        self.state = ClusterState(self.fleet, self.settings)
        self.queues = self.state.queues
        placement = own_placement(self.state, self.fleet, self.settings)
        self.orchestrator = Orchestrator(placement, self.settings, metrics, self.release)

    def release(self, handoff, after_s):
        self.released.append(handoff)
        self.released_after_s = after_s

    def emit(self, delta):
        self.emitted.append(delta)
        self.log.append(f"emitted {delta.token_ids}")
        return self.stop_at is not None and self.stop_at in delta.token_ids

    async def run(self, **params):
        wish = SamplingParams(**{"max_tokens": 3, "temperature": 0.0} | params)
        request = SequenceRequest("r", PROMPT, sampling_of(wish), reasoning_ended=True, cache_salt="a")
        await self.orchestrator.run(request, self.emit)

    async def run_since(self, head_read_s):
        wish = SamplingParams(max_tokens=3, temperature=0.0)
        await self.orchestrator.run(SequenceRequest("r", PROMPT, sampling_of(wish), head_read_s=head_read_s), self.emit)

    def client(self, name):
        return self.fleet.get(f"{name}-0").client

    @property
    def tokens(self):
        return [token for delta in self.emitted for token in delta.token_ids]

    def count(self, **labels):
        return self.registry.get_sample_value("ridgeline_requests_total", labels)

    @property
    def in_flight(self):
        return self.registry.get_sample_value("ridgeline_requests_in_flight")

    def assert_idle(self):
        assert self.in_flight == 0
        for worker in self.fleet.workers:
            assert (worker.outstanding.running, worker.outstanding.prompt_tokens) == (0, 0)


def split(**fields):
    return Bench(**{"prefill": [FIRST], "decode": [SECOND, LAST]} | fields)


# --- the whole way


async def test_the_first_token_goes_out_before_decode_is_asked():
    bench = split()
    await bench.run()
    assert bench.log == ["prefill-0 asked", "emitted [1]", "decode-0 asked", "emitted [2]", "emitted [3]"]
    assert [delta.finished for delta in bench.emitted] == [False, False, True]
    assert bench.emitted[0].handoff is None, "clients do not see hand-offs"
    assert bench.count(path="disaggregated", outcome="finished") == 1
    bench.assert_idle()


async def test_each_leg_is_told_what_it_needs():
    bench = split()
    await bench.run()
    [prefill], [decode] = bench.client("prefill").tasks, bench.client("decode").tasks
    assert (prefill.request_id, prefill.leg, prefill.handoff, prefill.emitted_token_ids) == (
        "r-prefill",
        "prefill",
        None,
        [],
    )
    assert (decode.request_id, decode.leg, decode.handoff, decode.emitted_token_ids) == (
        "r-decode",
        "decode",
        HANDOFF,
        [1],
    )
    for task in (prefill, decode):
        assert (task.prompt_token_ids, task.first_token) == (PROMPT, "continue")
        assert (task.reasoning_ended, task.cache_salt) == (True, "a")
        assert sampling.decode(task.sampling).max_tokens == 3


async def test_a_fetched_hand_off_is_not_released_again():
    bench = split()
    await bench.run()
    assert bench.released == []


async def test_what_needs_resampling_is_told_to_both_legs_and_counted_with_its_reason():
    bench = split(prefill=[msgspec.structs.replace(FIRST, token_ids=[])])
    await bench.run(presence_penalty=0.5)
    assert bench.client("prefill").tasks[0].first_token == "resample"
    assert bench.client("decode").tasks[0].first_token == "resample"
    assert bench.client("decode").tasks[0].emitted_token_ids == []
    assert bench.tokens == [2, 3]
    labels = {"mode": "resample", "reason": "presence_penalty"}
    assert bench.registry.get_sample_value("ridgeline_first_token_total", labels) == 1


async def test_the_latencies_of_a_token_belong_to_the_pool_that_made_it():
    whole, resampled = split(), split(prefill=[msgspec.structs.replace(FIRST, token_ids=[])])
    await whole.run()
    await resampled.run(presence_penalty=0.5)
    counts = [
        {
            (name, pool): bench.registry.get_sample_value(f"ridgeline_{name}_seconds_count", {"pool": pool})
            for name in ("ttft", "second_token", "itl", "tpot")
            for pool in ("prefill", "decode")
            if bench.registry.get_sample_value(f"ridgeline_{name}_seconds_count", {"pool": pool})
        }
        for bench in (whole, resampled)
    ]
    rest = {("second_token", "decode"): 1, ("tpot", "decode"): 1}
    assert counts == [
        {("ttft", "prefill"): 1, ("itl", "decode"): 2, **rest},
        {("ttft", "decode"): 1, ("itl", "decode"): 1, **rest},
    ]


async def test_a_first_token_stays_with_prefill_when_decode_then_computes_the_prompt_again():
    timing = msgspec.structs.replace(TIMING, transfer_result=TransferResult(outcome="timeout", wait_s=0.0, wire_s=0.0))
    bench = split(decode=[SECOND, msgspec.structs.replace(LAST, timing=timing)])
    await bench.run()
    assert bench.count(path="fallback", outcome="finished") == 1
    assert bench.registry.get_sample_value("ridgeline_ttft_seconds_count", {"pool": "prefill"}) == 1
    assert bench.registry.get_sample_value("ridgeline_ttft_seconds_count", {"pool": "decode"}) is None


async def test_the_time_before_the_orchestrator_is_in_the_first_tokens_latency_and_a_stage_of_its_own():
    bench = split()
    await bench.run_since(time.monotonic() - 100.0)
    seconds = bench.registry.get_sample_value
    assert seconds("ridgeline_ttft_seconds_sum", {"pool": "prefill"}) >= 100.0
    assert seconds("ridgeline_stage_seconds_sum", {"stage": "preprocess"}) >= 100.0


async def test_an_answer_of_one_token_never_touches_decode():
    bench = split(prefill=[WHOLE])
    await bench.run()
    assert bench.emitted == [WHOLE]
    assert bench.client("decode").tasks == []
    assert bench.released == []
    assert bench.count(path="disaggregated", outcome="finished") == 1
    bench.assert_idle()


async def test_a_colocated_replica_does_it_all():
    bench = Bench("colocated", colocated=[SECOND, LAST], prefill=[FIRST], decode=[LAST])
    await bench.run()
    assert bench.log == ["colocated-0 asked", "emitted [2]", "emitted [3]"]
    [task] = bench.client("colocated").tasks
    assert (task.leg, task.handoff, task.recompute_reason) == ("decode", None, "")
    assert bench.count(path="colocated", outcome="finished") == 1
    bench.assert_idle()


async def test_what_workers_had_of_prompts_is_counted_once_per_attempt_where_they_looked():
    cached = msgspec.structs.replace
    bench = split(prefill=[cached(FIRST, num_cached_tokens=32)], decode=[cached(LAST, num_cached_tokens=70)])
    await bench.run()
    await bench.run()
    colocated = Bench("colocated", colocated=[cached(SECOND, num_cached_tokens=0), cached(LAST, num_cached_tokens=0)])
    await colocated.run()
    blind = Bench("colocated", colocated=[LAST])
    await blind.run()
    for one, pool, counts in (
        (bench, "prefill", (140, 64)),
        (bench, "decode", (None, None)),
        (colocated, "colocated", (70, 0)),
        (blind, "colocated", (None, None)),
    ):
        kinds = ("query", "hit")
        found = (
            one.registry.get_sample_value(f"ridgeline_prefix_cache_{kind}_tokens_total", {"pool": pool})
            for kind in kinds
        )
        assert tuple(found) == counts


async def test_a_short_prompt_is_computed_on_decode_which_is_told_why():
    bench = split(min_remote=71)
    await bench.run()
    assert bench.client("prefill").tasks == []
    [task] = bench.client("decode").tasks
    assert (task.handoff, task.recompute_reason) == (None, "short_prompt")
    assert bench.count(path="decode_only", outcome="finished") == 1
    bench.assert_idle()


async def test_a_prompt_at_the_limit_is_prefilled_remotely():
    bench = split(min_remote=70)
    await bench.run()
    assert len(bench.client("prefill").tasks) == 1


# --- what is reserved meanwhile


async def test_the_prompt_counts_on_prefill_and_the_sequence_on_decode_from_the_start():
    bench = split(prefill=[FOREVER])
    running = asyncio.create_task(bench.run())
    await eventually(lambda: bench.client("prefill").tasks)
    prefill, decode = (bench.fleet.get(name).outstanding for name in ("prefill-0", "decode-0"))
    assert (prefill.running, prefill.prompt_tokens) == (1, 70)
    assert (decode.running, decode.prompt_tokens) == (1, 0)
    assert bench.in_flight == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    bench.assert_idle()


async def test_prefill_is_free_again_while_decode_goes_on():
    bench = split(decode=[SECOND, FOREVER])
    running = asyncio.create_task(bench.run())
    await eventually(lambda: bench.tokens == [1, 2])
    assert bench.fleet.get("prefill-0").outstanding.running == 0
    assert bench.fleet.get("decode-0").outstanding.running == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    bench.assert_idle()


@pytest.mark.parametrize(("script", "outstanding"), [([FOREVER], 70), ([SECOND, FOREVER], 0)])
async def test_a_replicas_prompt_counts_until_its_first_token(script, outstanding):
    bench = Bench("colocated", colocated=script)
    running = asyncio.create_task(bench.run())
    await eventually(lambda: bench.client("colocated").tasks)
    await eventually(lambda: len(bench.emitted) == len(script) - 1)
    held = bench.fleet.get("colocated-0").outstanding
    assert (held.running, held.prompt_tokens) == (1, outstanding)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    bench.assert_idle()


async def test_requests_at_a_time_spread_over_the_workers():
    bench = Bench(**{"prefill-0": [FIRST], "decode-0": [FOREVER], "decode-1": [FOREVER]})
    running = [asyncio.create_task(bench.run()) for _ in range(4)]
    decoders = bench.fleet.pool("decode")
    await eventually(lambda: sum(len(worker.client.tasks) for worker in decoders) == 4)
    assert [worker.outstanding.running for worker in decoders] == [2, 2]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    bench.assert_idle()


# --- ends between and in the legs


async def test_a_stop_string_in_the_first_token_releases_the_hand_off_without_decode():
    bench = split()
    bench.stop_at = 1
    await bench.run()
    assert bench.released == [HANDOFF]
    assert bench.released_after_s == 0.0, "there is no decode leg that could still begin"
    assert bench.client("decode").tasks == []
    assert bench.count(path="disaggregated", outcome="finished") == 1
    bench.assert_idle()


async def test_a_stop_string_in_a_later_token_aborts_decode_and_releases_nothing():
    bench = split(decode=[SECOND, FOREVER])
    bench.stop_at = 2
    await bench.run()
    assert bench.client("decode").closed_early == 1
    assert bench.released == [], "decode has fetched and released it"
    assert bench.count(path="disaggregated", outcome="finished") == 1
    bench.assert_idle()


@pytest.mark.parametrize(
    ("scripts", "released"),
    [
        ({"prefill": [FOREVER]}, []),
        ({"decode": [FOREVER]}, [HANDOFF]),
        ({"decode": [SECOND, FOREVER]}, None),
    ],
    ids=["while prefilling", "before decode's first token", "while decoding"],
)
async def test_a_client_that_leaves_aborts_the_leg_that_runs_and_frees_the_hand_off(scripts, released):
    bench = split(**scripts)
    running = asyncio.create_task(bench.run())
    leg = "prefill" if "prefill" in scripts else "decode"
    await eventually(lambda: bench.client(leg).tasks)
    await asyncio.sleep(0.005)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert bench.client(leg).closed_early == 1
    if released is not None:  # once decode has produced a token, the fetch has released it; again does no harm
        assert bench.released == released
    assert bench.count(path="disaggregated", outcome="cancelled") == 1
    bench.assert_idle()


@pytest.mark.parametrize(
    "error", [WorkerLost("gone"), EngineFailed("dead"), WorkerDraining("leaves"), TaskRejected("draining")]
)
async def test_a_decode_worker_that_always_fails_is_not_asked_for_ever_and_every_hand_off_is_freed(error):
    bench = split(decode=[error])
    with pytest.raises(type(error), match=str(error)):
        await bench.run(max_tokens=30)
    attempts = 1 + MAX_FRUITLESS_RETRIES
    assert bench.released == [HANDOFF] * attempts
    assert bench.released_after_s == ABORT_FIRST_S
    assert len(bench.client("decode").tasks) == attempts
    assert len({task.request_id for task in bench.client("decode").tasks}) == attempts
    assert bench.count(path="disaggregated", outcome="failed") == 1
    bench.assert_idle()


@pytest.mark.parametrize("error", [WorkerLost("gone"), EngineFailed("dead")])
async def test_a_request_that_ends_every_engine_after_a_token_or_two_ends_after_a_few_of_them(error):
    bench = split(decode=[SECOND, SECOND, error])
    with pytest.raises(type(error), match=str(error)):
        await bench.run(max_tokens=1000)
    assert len(bench.client("decode").tasks) == MAX_LOSSES
    assert len(bench.tokens) == 3 * MAX_LOSSES, "it made progress each time"
    bench.assert_idle()


async def test_a_stream_may_be_drained_from_one_worker_to_the_next_any_number_of_times():
    bench = split()
    once(bench.client("decode"), *[[SECOND, WorkerDraining("leaves")]] * (2 * MAX_LOSSES), [LAST])
    await bench.run(max_tokens=1000)
    assert len(bench.client("decode").tasks) == 2 * MAX_LOSSES + 1
    bench.assert_idle()


async def test_a_decode_worker_that_leaves_while_the_prompt_waits_for_its_turn_costs_no_attempt():
    bench = split(**{"decode-1": [SECOND, LAST]})
    with bench.fleet.get("prefill-0").reserve(bench.settings.prefill_window_tokens["prefill"]):
        running = asyncio.create_task(bench.run())
        await eventually(lambda: bench.queues["prefill"].waiting)
        bench.fleet.get("decode-0").status = WorkerStatus(worker_id="decode-0", draining=True)
    bench.state.look()
    await running
    assert bench.tokens == [1, 2, 3]
    assert bench.fleet.get("decode-0").client.tasks == []
    retried = {"state": "queued", "cause": "draining"}
    assert bench.registry.get_sample_value("ridgeline_retries_total", retried) is None
    bench.assert_idle()


async def test_when_all_decode_workers_leave_meanwhile_it_is_for_their_leaving_that_it_tries_again():
    bench = split()
    with bench.fleet.get("prefill-0").reserve(bench.settings.prefill_window_tokens["prefill"]):
        running = asyncio.create_task(bench.run())
        await eventually(lambda: bench.queues["prefill"].waiting)
        bench.fleet.get("decode-0").status = WorkerStatus(worker_id="decode-0", draining=True)
    bench.state.look()
    await running
    retried = {"state": "queued", "cause": "draining"}
    assert bench.registry.get_sample_value("ridgeline_retries_total", retried) == 1
    [task] = bench.client("prefill").tasks
    assert (task.leg, task.recompute_reason) == ("decode", "no_decode_worker"), "prefill serves it whole"
    bench.assert_idle()


async def test_what_is_the_requests_own_fault_is_not_tried_again():
    for scripts in ({"decode": [InvalidTask("no")]}, {"prefill": [InvalidTask("no")]}):
        bench = split(**scripts)
        with pytest.raises(InvalidTask, match="no"):
            await bench.run()
        assert len(bench.client(next(iter(scripts))).tasks) == 1
        bench.assert_idle()


@pytest.mark.parametrize("error", [WorkerLost("gone"), EngineFailed("dead")])
async def test_a_prefill_worker_that_always_fails_emits_nothing_and_asks_no_decode(error):
    bench = split(prefill=[error])
    with pytest.raises(type(error), match=str(error)):
        await bench.run()
    assert bench.log == ["prefill-0 asked"] * (1 + MAX_FRUITLESS_RETRIES)
    assert bench.released == []
    assert bench.count(path="disaggregated", outcome="failed") == 1
    bench.assert_idle()


def once(client, first, *later):
    """The client plays `first` for its first task and `later` for the others."""
    run_task, scripts = client.run_task, iter((first, *later))

    def another(task, on_delta):
        client.script = next(scripts)
        return run_task(task, on_delta)

    client.run_task = another


async def test_the_next_attempt_is_told_what_the_client_has_and_the_pause_is_counted():
    bench = split()
    once(bench.client("prefill"), [FIRST], [msgspec.structs.replace(FIRST, token_ids=[7])])
    once(bench.client("decode"), [SECOND, WorkerLost("killed")], [LAST])
    await bench.run(max_tokens=9)
    assert bench.tokens == [1, 2, 7, 3]
    assert bench.client("prefill").tasks[1].emitted_token_ids == [1, 2]
    assert bench.client("decode").tasks[1].emitted_token_ids == [1, 2, 7]
    assert {task.cache_salt for name in ("prefill", "decode") for task in bench.client(name).tasks} == {"a"}
    labels = {"state": "decoding", "cause": "worker_lost"}
    assert bench.registry.get_sample_value("ridgeline_retries_total", labels) == 1
    assert bench.registry.get_sample_value("ridgeline_continuation_pause_seconds_count", {"state": "decoding"}) == 1
    [record] = bench.metrics.ended.latest(1)
    assert [stage.worker for stage in record.stages if stage.name == "lost"] == ["decode-0"]
    assert (record.placements, record.error) == (2, "")
    bench.assert_idle()


async def test_an_answer_that_depends_on_its_own_tokens_is_repeated_not_prefilled():
    bench = split(prefill=[msgspec.structs.replace(FIRST, token_ids=[])])
    once(bench.client("decode"), [SECOND, WorkerLost("killed")], [LAST])
    await bench.run(presence_penalty=0.5)
    assert bench.tokens == [2, 3]
    for task in (bench.client("prefill").tasks[1], bench.client("decode").tasks[1]):
        assert (task.emitted_token_ids, task.first_token) == ([2], "resample")


async def test_a_stream_that_its_workers_cannot_repeat_ends_with_a_sentence_that_says_so():
    bench = split(prefill=[msgspec.structs.replace(FIRST, token_ids=[])], decode=[SECOND, WorkerLost("killed")])
    worker = bench.fleet.get("decode-0")
    worker.description = msgspec.structs.replace(worker.description, repeats_tokens=False)
    with pytest.raises(CannotContinue, match="presence_penalty"):
        await bench.run(presence_penalty=0.5)
    assert bench.tokens == [2]
    bench.assert_idle()


async def test_an_answer_is_repeated_by_no_worker_that_cannot_even_if_its_pool_was_away_when_it_was_lost():
    bench = split(prefill=[msgspec.structs.replace(FIRST, token_ids=[])])
    worker, client = bench.fleet.get("decode-0"), bench.client("decode")
    worker.description = msgspec.structs.replace(worker.description, repeats_tokens=False)
    run_task = client.run_task

    async def dies_and_is_back(task, on_delta):
        client.script = [SECOND, WorkerLost("killed")] if len(client.tasks) == 0 else [LAST]
        try:
            await run_task(task, on_delta)
        except WorkerLost:
            client.connected = False  # for a moment the prefill worker answers, which could repeat
            asyncio.get_running_loop().call_soon(setattr, client, "connected", True)
            raise

    client.run_task = dies_and_is_back
    with pytest.raises(CannotContinue):
        await bench.run(presence_penalty=0.5)
    assert (len(client.tasks), bench.tokens) == (1, [2])
    bench.assert_idle()


async def test_an_emit_that_fails_between_the_legs_frees_the_hand_off():
    bench = split()

    def emit(delta):
        raise RuntimeError("no listener")

    bench.emit = emit
    with pytest.raises(RuntimeError, match="no listener"):
        await bench.run()
    assert bench.released == [HANDOFF]
    bench.assert_idle()


@pytest.mark.parametrize(
    ("scripts", "released"),
    [({"prefill": [FOREVER]}, []), ({"decode": [FOREVER]}, [HANDOFF])],
    ids=["prefill", "decode"],
)
async def test_a_request_past_its_deadline_fails_naming_the_setting_and_leaves_nothing_behind(scripts, released):
    bench = split(deadline_s=0.01, **scripts)
    with pytest.raises(DeadlineExceeded, match=r"router\.request_timeout_s"):
        await bench.run()
    assert bench.released == released
    assert bench.client(next(iter(scripts))).closed_early == 1
    assert bench.count(path="disaggregated", outcome="failed") == 1
    [record] = bench.metrics.ended.latest(1)
    assert (record.outcome, record.error) == ("failed", "DeadlineExceeded")
    assert sum(stage.duration_s for stage in record.stages) == pytest.approx(record.latency_s)
    bench.assert_idle()


async def test_without_any_usable_worker_a_request_ends_after_the_time_to_recover():
    bench = split()
    bench.client("prefill").connected = bench.client("decode").connected = False
    with pytest.raises(NoWorker):
        await bench.run()
    assert bench.log == []
    bench.assert_idle()


async def test_without_a_usable_decode_worker_a_prefill_worker_serves_the_whole_request_and_is_told_why():
    bench = split(prefill=[WHOLE])
    bench.client("decode").connected = False
    await bench.run()
    [task] = bench.client("prefill").tasks
    assert (task.leg, task.handoff, task.recompute_reason) == ("decode", None, "no_decode_worker")
    assert bench.count(path="fallback", outcome="finished") == 1
    bench.assert_idle()


async def test_without_a_usable_prefill_worker_decode_computes_the_prompt_and_is_told_why():
    bench = split()
    bench.client("prefill").connected = False
    await bench.run()
    [task] = bench.client("decode").tasks
    assert (task.handoff, task.recompute_reason) == (None, "no_prefill_worker")
    assert bench.count(path="fallback", outcome="finished") == 1
    bench.assert_idle()


async def test_every_request_has_exactly_one_outcome():
    bench = split()
    for _ in range(5):
        await bench.run()
    bench.client("decode").script = [InvalidTask("no")]
    with pytest.raises(InvalidTask):
        await bench.run()
    assert bench.count(path="disaggregated", outcome="finished") == 5
    assert bench.count(path="disaggregated", outcome="failed") == 1
    assert bench.count(path="disaggregated", outcome="cancelled") is None


# --- following a prefill of several chunks

GROWING = msgspec.structs.replace(HANDOFF, complete=False)
ANNOUNCED = TokenDelta(request_id="r", handoff=GROWING)


def followed(bench, result):
    return bench.registry.get_sample_value("ridgeline_overlapped_handoffs_total", {"result": result})


async def test_decode_is_asked_while_prefill_goes_on_and_its_tokens_come_after_the_first():
    bench = split(prefill=[ANNOUNCED, FIRST])
    await bench.run()
    assert bench.tokens == [1, 2, 3]
    assert bench.count(path="disaggregated", outcome="finished") == 1
    [task] = bench.client("decode").tasks
    assert (task.handoff, task.emitted_token_ids, task.first_token) == (GROWING, [], "continue")
    assert bench.log.index("decode-0 asked") < bench.log.index("emitted [1]")
    assert (followed(bench, "ok"), bench.released) == (1, [])
    bench.assert_idle()


async def test_a_lost_hand_off_is_handed_over_again_after_prefill():
    bench = split(prefill=[ANNOUNCED, FIRST])
    once(bench.client("decode"), [HandoffLost("revoked")], [SECOND, LAST])
    await bench.run()
    assert bench.tokens == [1, 2, 3]
    early, late = bench.client("decode").tasks
    assert (early.handoff.complete, late.handoff.complete, late.emitted_token_ids) == (False, True, [1])
    assert early.request_id != late.request_id
    assert (followed(bench, "revoked"), followed(bench, "ok")) == (1, None)
    bench.assert_idle()


async def test_a_decode_worker_without_room_is_asked_only_after_prefill():
    bench = split(prefill=[ANNOUNCED, FIRST])
    bench.fleet.get("decode-0").status = WorkerStatus(worker_id="decode-0", kv_blocks_free=27)
    await bench.run()
    [task] = bench.client("decode").tasks
    assert task.handoff.complete
    assert (bench.tokens, followed(bench, "no_room")) == ([1, 2, 3], 1)


async def test_an_answer_that_ends_at_its_first_token_aborts_the_leg_that_followed():
    bench = split(prefill=[ANNOUNCED, WHOLE], decode=[FOREVER])
    await bench.run()
    assert (bench.tokens, bench.client("decode").closed_early) == ([1], 1)
    bench.assert_idle()


async def test_a_client_that_leaves_while_decode_follows_aborts_both_legs():
    bench = split(prefill=[ANNOUNCED, FOREVER], decode=[FOREVER])
    running = asyncio.create_task(bench.run())
    await eventually(lambda: "decode-0 asked" in bench.log)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (bench.client("prefill").closed_early, bench.client("decode").closed_early) == (1, 1)
    bench.assert_idle()


async def test_a_prefill_that_fails_while_decode_follows_aborts_decode_and_begins_again():
    bench = split(decode=[FOREVER])
    once(bench.client("prefill"), [ANNOUNCED, WorkerLost("gone")], [WHOLE])
    await bench.run()
    assert (bench.tokens, bench.client("decode").closed_early) == ([1], 1)
    bench.assert_idle()


async def test_a_followed_answer_is_finished_when_its_consumer_cancels_right_after_the_last_token():
    bench = split(prefill=[ANNOUNCED, FIRST])
    running = asyncio.create_task(bench.run())
    emit = bench.emit

    def cancelling(delta):
        if delta.finished:
            asyncio.get_running_loop().call_soon(running.cancel)
        return emit(delta)

    bench.emit = cancelling
    with pytest.raises(asyncio.CancelledError):
        await running
    assert bench.count(path="disaggregated", outcome="finished") == 1
    assert bench.count(path="disaggregated", outcome="cancelled") is None


async def test_a_decode_worker_lost_while_the_prompt_waited_costs_nothing():
    bench = split(**{"decode-1": [SECOND, LAST]})
    with bench.fleet.get("prefill-0").reserve(bench.settings.prefill_window_tokens["prefill"]):
        running = asyncio.create_task(bench.run())
        await asyncio.sleep(0.05)
        bench.fleet.get("decode-0").client.connected = False
        assert bench.log == []
    bench.state.look()
    await running
    assert bench.tokens == [1, 2, 3]
    assert [line for line in bench.log if "prefill" in line] == ["prefill-0 asked"]
    retried = {"state": "queued", "cause": "worker_lost"}
    assert bench.registry.get_sample_value("ridgeline_retries_total", retried) is None
    bench.assert_idle()


async def test_decode_is_chosen_when_the_prompt_has_its_turn_by_the_blocks_it_will_need():
    bench = split(**{"decode-1": [SECOND, LAST]})
    crowded, roomy = bench.fleet.get("decode-0"), bench.fleet.get("decode-1")
    with bench.fleet.get("prefill-0").reserve(2000):
        task = asyncio.create_task(bench.run())
        await asyncio.sleep(0)
        with roomy.reserve():  # more run there, and it has the blocks
            crowded.status = WorkerStatus(worker_id="decode-0", kv_blocks_free=1, kv_blocks_total=100)
            bench.state.look()
    await task
    assert (len(crowded.client.tasks), len(roomy.client.tasks)) == (0, 1)
    bench.assert_idle()
    assert [(w.outstanding.promised_blocks, w.outstanding.held_blocks) for w in (crowded, roomy)] == [(0, 0)] * 2
