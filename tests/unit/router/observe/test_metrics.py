"""Every series with its labels, and none where there is no data."""

import asyncio
import math
import time
from importlib.metadata import version
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ridgeline.contracts.handoff import TransferResult
from ridgeline.contracts.tasks import LegTiming
from ridgeline.contracts.workers import WorkerStatus
from ridgeline.router.fleet.pairing import KvPair
from ridgeline.router.flow.fair_queue import Waiting
from ridgeline.router.observe.collectors import BuildInfo, WorkerCollector
from ridgeline.router.observe.metrics import RequestMetrics
from ridgeline.router.observe.timeline import RequestTimeline
from ridgeline.router.placement.pool_queue import QueueCollector, QueueNow
from ridgeline.router.settings import PoolHardware
from tests.support.clock import FakeClock
from tests.support.ended_requests import ended, handed_over

HARDWARE = {
    "prefill": PoolHardware("host", peak_flops=1e12, peak_bytes_per_s=1e10, source="data sheet"),
    "decode": PoolHardware("host", peak_flops=2e12, peak_bytes_per_s=2e10, source="data sheet"),
}


@pytest.fixture
def registry():
    return CollectorRegistry()


def samples(registry):
    """{(name, sorted labels): value} as a scraper reads them."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(registry, name, **labels):
    return samples(registry).get((name, tuple(sorted(labels.items()))))


def names(registry):
    return {name for name, _ in samples(registry)}


def closed(registry, outcome="finished", path="disaggregated", pools=("prefill", "decode", "decode")):
    """A request of one token from each of `pools`, which has ended."""
    clock, metrics = FakeClock(), RequestMetrics(registry)
    timeline = RequestTimeline(clock, "r", 70, path=path, observe=metrics.observe)
    for pool in pools:
        clock.now_s += 0.25
        timeline.tokens(1, pool)
    metrics.close(timeline, outcome)


def worker(pool, worker_id, **status):
    told = WorkerStatus(worker_id=worker_id, **status)
    return a_worker(pool, worker_id, status=told, counted={pool: told.counters})


def a_worker(pool, worker_id, favours=None, *, status=None, counted=(), connected=True, healthy=True, drains=False):
    client = SimpleNamespace(connected=connected)
    known = {"status": status, "counted": dict(counted), "client": client, "healthy": healthy, "drains": drains}
    return SimpleNamespace(pool=pool, worker_id=worker_id, favours=favours, max_num_seqs=16, **known)


PAIRS = [KvPair("prefill-0", "decode-0", "shm", "")]


def collect(registry, *workers):
    registry.register(WorkerCollector(lambda: workers, lambda: HARDWARE, lambda: "disaggregated", lambda: PAIRS, dict))


def test_a_disaggregated_request_credits_each_token_to_the_pool_that_made_it(registry):
    closed(registry)
    assert value(registry, "ridgeline_ttft_seconds_count", pool="prefill") == 1
    assert value(registry, "ridgeline_ttft_seconds_sum", pool="prefill") == 0.25
    assert value(registry, "ridgeline_tpot_seconds_sum", pool="decode") == 0.25
    assert value(registry, "ridgeline_itl_seconds_count", pool="decode") == 2
    assert value(registry, "ridgeline_e2e_seconds_sum", pool="decode") == 0.75
    assert value(registry, "ridgeline_output_tokens_total", pool="decode") == 3
    assert value(registry, "ridgeline_second_token_seconds_count", pool="decode") == 1
    assert value(registry, "ridgeline_requests_total", path="disaggregated", outcome="finished") == 1


def test_a_colocated_request_is_all_of_one_pool(registry):
    closed(registry, path="colocated", pools=("colocated",) * 3)
    assert value(registry, "ridgeline_ttft_seconds_count", pool="colocated") == 1
    assert value(registry, "ridgeline_tpot_seconds_count", pool="colocated") == 1
    assert value(registry, "ridgeline_requests_total", path="colocated", outcome="finished") == 1


def test_a_request_of_one_token_has_a_ttft_and_no_tpot(registry):
    closed(registry, pools=("prefill",))
    assert value(registry, "ridgeline_ttft_seconds_count", pool="prefill") == 1
    assert "ridgeline_tpot_seconds_count" not in names(registry)
    assert "ridgeline_second_token_seconds_count" not in names(registry)


@pytest.mark.parametrize("outcome", ["failed", "cancelled"])
def test_an_unfinished_request_counts_by_outcome_and_does_not_flatter_tpot_and_stages(registry, outcome):
    closed(registry, outcome=outcome)
    assert value(registry, "ridgeline_requests_total", path="disaggregated", outcome=outcome) == 1
    assert value(registry, "ridgeline_ttft_seconds_count", pool="prefill") == 1
    assert "ridgeline_tpot_seconds_count" not in names(registry)
    assert "ridgeline_stage_seconds_count" not in names(registry)


def test_the_latencies_of_a_token_are_seen_before_its_sequence_ends(registry):
    metrics = RequestMetrics(registry)
    timeline = RequestTimeline(FakeClock(), "r", 70, "disaggregated", observe=metrics.observe)
    for _ in range(3):
        timeline.tokens(1, "colocated")
    assert value(registry, "ridgeline_ttft_seconds_count", pool="colocated") == 1
    assert value(registry, "ridgeline_second_token_seconds_count", pool="colocated") == 1
    assert value(registry, "ridgeline_itl_seconds_count", pool="colocated") == 2


def test_before_the_first_request_there_is_no_series_of_requests_but_that_none_is_served(registry):
    RequestMetrics(registry)
    assert [name for name, *_ in samples(registry)] == ["ridgeline_requests_in_flight"]


def test_worker_counters_carry_pool_worker_and_their_own_labels(registry):
    counters = {
        "flops_total.decode": 5.0,
        "bytes_total.decode.kv_read": 7.0,
        "busy_seconds_total.mixed": 1.5,
        "steps_total.prefill": 3.0,
        "tokens_total.prefill": 70.0,
        "recompute_total.timeout": 2.0,
        "kv_bytes_total.sent": 11.0,
        "fetches_total.ok": 4.0,
        "expired_leases_total": 1.0,
    }
    collect(registry, worker("decode", "d0", counters=counters))
    us = {"pool": "decode", "worker": "d0"}
    assert value(registry, "ridgeline_flops_total", **us, step="decode") == 5
    assert value(registry, "ridgeline_bytes_total", **us, step="decode", kind="kv_read") == 7
    assert value(registry, "ridgeline_busy_seconds_total", **us, step="mixed") == 1.5
    assert value(registry, "ridgeline_steps_total", **us, step="prefill") == 3
    assert value(registry, "ridgeline_tokens_total", **us, phase="prefill") == 70
    assert value(registry, "ridgeline_recompute_total", **us, reason="timeout") == 2
    assert value(registry, "ridgeline_kv_transfer_bytes_total", **us, direction="sent") == 11
    assert value(registry, "ridgeline_fetches_total", **us, result="ok") == 4
    assert value(registry, "ridgeline_expired_leases_total", **us) == 1


def test_worker_gauges_are_read_from_the_last_status(registry):
    counters = {"open_leases": 2.0, "pinned_blocks": 6.0, "active_fetches": 1.0, "watched_handoffs": 3.0}
    state = {"running": 4, "waiting": 5, "tasks": 9, "kv_blocks_free": 70, "kv_blocks_total": 100}
    collect(registry, worker("decode", "d0", counters=counters, **state))
    expected = {
        "leases": 2,
        "pinned_blocks": 6,
        "active_fetches": 1,
        "watched_handoffs": 3,
        "running": 4,
        "waiting": 5,
        "tasks": 9,
        "kv_blocks_free": 70,
        "kv_blocks": 100,
    }
    for name, number in expected.items():
        assert value(registry, f"ridgeline_{name}", pool="decode", worker="d0") == number


def test_pool_series_sum_over_the_workers_of_the_pool_and_peaks_are_one_workers(registry):
    collect(
        registry,
        worker("prefill", "p0", counters={"flops_total.prefill": 600.0, "bytes_total.prefill.weights": 2.0}),
        worker("prefill", "p1", counters={"flops_total.mixed": 200.0, "bytes_total.mixed.kv_write": 6.0}),
        worker("decode", "d0", counters={"flops_total.decode": 10.0, "bytes_total.decode.weights": 5.0}),
    )
    assert value(registry, "ridgeline_workers", pool="prefill") == 2
    assert value(registry, "ridgeline_arithmetic_intensity", pool="prefill") == 100
    assert value(registry, "ridgeline_arithmetic_intensity", pool="decode") == 2
    assert value(registry, "ridgeline_peak_flops", pool="prefill") == 1e12
    assert value(registry, "ridgeline_peak_bytes_per_second", pool="decode") == 2e10
    assert value(registry, "ridgeline_hardware_info", pool="decode", hardware="host", source="data sheet") == 1


def test_a_worker_that_has_not_reported_a_figure_has_no_series_for_it(registry):
    collect(registry, worker("decode", "d0", counters={}))
    assert value(registry, "ridgeline_arithmetic_intensity", pool="decode") is None
    assert value(registry, "ridgeline_leases", pool="decode", worker="d0") is None
    assert "ridgeline_flops_total" not in names(registry)


def test_only_workers_that_may_be_given_work_are_counted_as_there_and_the_others_by_why_not(registry):
    collect(
        registry,
        worker("decode", "d0"),
        a_worker("decode", "d1", drains=True),
        a_worker("decode", "d2", healthy=False),
        a_worker("decode", "d3", connected=False, healthy=False),
        a_worker("decode", "d4", connected=False, drains=True),
    )
    assert value(registry, "ridgeline_workers", pool="decode") == 1
    assert value(registry, "ridgeline_unusable_workers", pool="decode", state="draining") == 1
    assert value(registry, "ridgeline_unusable_workers", pool="decode", state="failed") == 1
    assert value(registry, "ridgeline_unusable_workers", pool="decode", state="detached") == 2


def test_a_pool_that_has_lost_all_its_workers_shows_none_of_them(registry):
    collect(registry, worker("decode", "d0"))
    assert value(registry, "ridgeline_workers", pool="prefill") == 0


def test_a_lost_worker_has_no_series_and_is_not_counted_as_connected(registry):
    collect(registry, worker("decode", "d0"), a_worker("decode", "d1", connected=False))
    assert not [labels for _, labels in samples(registry) if ("worker", "d1") in labels]
    assert value(registry, "ridgeline_workers", pool="decode") == 1


def test_a_counter_of_a_newer_worker_is_passed_over(registry):
    collect(registry, worker("decode", "d0", counters={"novelty_total.a": 1.0, "steps_total.a.b": 2.0}))
    assert not {name for name in names(registry) if "novelty" in name or "steps" in name}


def test_a_pool_of_unknown_hardware_has_no_peaks(registry):
    collect(registry, worker("colocated", "c0"))
    assert value(registry, "ridgeline_workers", pool="colocated") == 1
    assert value(registry, "ridgeline_peak_flops", pool="colocated") is None


def test_what_waits_in_the_router_is_shown_by_pool_and_a_rate_only_once_it_was_measured(registry):
    queues = {
        "prefill": QueueNow(Waiting(prompts=2, tokens=700), 0, starts_at_once=False, tokens_per_s=250.0),
        "decode": QueueNow(Waiting(), 0, starts_at_once=True, tokens_per_s=None),
    }
    registry.register(QueueCollector(lambda: queues))
    assert value(registry, "ridgeline_waiting_prompts", pool="prefill") == 2
    assert value(registry, "ridgeline_waiting_prompt_tokens", pool="prefill") == 700
    assert value(registry, "ridgeline_prompt_tokens_per_second", pool="prefill") == 250
    assert value(registry, "ridgeline_waiting_prompts", pool="decode") == 0
    assert value(registry, "ridgeline_prompt_tokens_per_second", pool="decode") is None


def finished(registry, **changes):
    """A sequence that has finished, with `changes`: 0.5 s to its first token, then 0.1 s to each of two more."""
    clock, metrics = FakeClock(), RequestMetrics(registry)
    timeline = RequestTimeline(clock, "r", 70, path="colocated", head_read_s=clock.now_s - 0.1, prompt_pool="colocated")
    for pause_s in (0.4, 0.1, 0.1):
        clock.now_s += pause_s
        timeline.tokens(1, "colocated")
    timeline.decode_timing = LegTiming(queue_s=0.15, first_token_s=0.2, compute_s=0.4)
    for name, changed in changes.items():
        setattr(timeline, name, changed)
    metrics.close(timeline, "finished")


def test_a_sequence_counts_for_each_slo_that_it_has_whether_it_finished_or_failed(registry):
    metrics = RequestMetrics(registry)
    for outcome in ("finished", "failed"):
        metrics.close(ended(None, 0.5, 0.5), outcome)
    metrics.close(ended(None, 0.5, limits=(math.inf, math.inf)), "finished")
    found = {labels: count for (name, labels), count in samples(registry).items() if "slo_sequences" in name}
    counted = {("ttft", "yes"): 1, ("ttft", "no"): 1, ("tpot", "no"): 2, ("all", "no"): 2}
    assert found == {(("met", met), ("slo", slo)): count for (slo, met), count in counted.items()}


def test_the_stages_are_counted_once_a_sequence_and_add_up_to_its_latency(registry):
    RequestMetrics(registry).close(handed_over(), "finished")
    series = "ridgeline_stage_seconds"
    sums = {dict(labels)["stage"]: s for (name, labels), s in samples(registry).items() if name == f"{series}_sum"}
    assert sums == {
        "preprocess": 0.125,
        "queue": 0.5,
        "dispatch": 0.25,
        "prefill": 0.5,
        "handoff_wait": 0.125,
        "wire": 0.25,
        "decode_queue": 0.375,
        "decode": 1.25,
    }
    assert {value(registry, f"{series}_count", stage=stage) for stage in sums} == {1}
    assert sum(sums.values()) == value(registry, "ridgeline_e2e_seconds_sum", pool="decode")


HANDED_OVER = {
    "prompt_pool": "prefill",
    "last_pool": "decode",
    "prefill_timing": LegTiming(queue_s=0.25, first_token_s=0.5, compute_s=0.5),
    "decode_timing": LegTiming(
        queue_s=0.5,
        first_token_s=0.5,
        compute_s=1.0,
        transfer_result=TransferResult(outcome="ok", wait_s=0.0625, wire_s=0.125),
    ),
}


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({"router_queue_s": 0.5}, {("colocated", "router"): 0.5, ("colocated", "engine"): 0.15}),
        (HANDED_OVER, {("prefill", "router"): 0, ("prefill", "engine"): 0.25, ("decode", "engine"): 0.3125}),
        pytest.param({"prompt_pool": None}, {}, id="it never had a place"),
    ],
)
def test_each_leg_waits_in_the_queue_of_its_pool(registry, changes, waits):
    finished(registry, **changes)
    sums = {labels: s for (name, labels), s in samples(registry).items() if name == "ridgeline_queue_seconds_sum"}
    assert sums == {(("pool", pool), ("where", where)): seconds for (pool, where), seconds in waits.items()}


def test_the_fastest_large_hand_off_is_the_peak_that_was_seen(registry):
    metrics = RequestMetrics(registry)
    for num_bytes, wire_s in ((16 << 20, 0.5), (32 << 20, 0.25), (16 << 20, 0.25), (4096, 1e-6)):
        timeline = RequestTimeline(FakeClock(), "r", 70, path="disaggregated", link=("prefill-0", "decode-0"))
        result = TransferResult(outcome="ok", num_bytes=num_bytes, wire_s=wire_s, transport="shm")
        timeline.decode_timing = LegTiming(queue_s=0.5, first_token_s=0.5, compute_s=1.0, transfer_result=result)
        metrics.close(timeline, "finished")
    assert value(registry, "ridgeline_link_fastest_bytes_per_second", transport="shm") == 128 << 20


async def test_a_router_counts_its_cpu_time(registry):
    counting = asyncio.create_task(RequestMetrics(registry).count_cpu("router-0"))
    await asyncio.sleep(0)
    counting.cancel()
    assert 0 < value(registry, "ridgeline_router_cpu_seconds_total", router="router-0") <= time.process_time()


def test_the_versions_and_the_model_are_one_series(registry):
    registry.register(BuildInfo("0.32.0", "llama"))
    assert value(registry, "ridgeline_build_info", version=version("ridgeline"), vllm="0.32.0", model="llama") == 1


def test_a_worker_that_is_kept_for_one_phase_says_which(registry):
    kept = a_worker("adaptive", "worker-0", "decode")
    either = a_worker("adaptive", "worker-1")
    registry.register(WorkerCollector(lambda: [kept, either], dict, lambda: "adaptive", list, dict))
    series = "ridgeline_worker_role_affinity"
    assert registry.get_sample_value(series, {"worker": "worker-0", "phase": "decode"}) == 1
    assert registry.get_sample_value(series, {"worker": "worker-1", "phase": "decode"}) is None


def test_a_fleet_of_64_has_no_series_for_each_pair_of_workers_and_none_that_tells_when_another_began(registry):
    metrics, ids = RequestMetrics(registry), [f"worker-{number}" for number in range(64)]
    pairs = [KvPair(one, other, "grpc", "on another host") for one in ids for other in ids if one != other]
    pairs[0] = KvPair(ids[0], ids[1], "shm", "")
    for pair in pairs[:1000]:
        timeline = RequestTimeline(FakeClock(), "r", 70, path="disaggregated", observe=metrics.observe)
        timeline.link = pair.link
        result = TransferResult(outcome="ok", num_bytes=1_000_000, wire_s=0.5, transport=pair.transport)
        timeline.decode_timing = LegTiming(queue_s=0.5, first_token_s=0.5, compute_s=1.0, transfer_result=result)
        metrics.close(timeline, "finished")
    workers = [worker("adaptive", name, counters={"tokens_total.prefill": 1.0}) for name in ids]
    registry.register(WorkerCollector(lambda: workers, dict, lambda: "adaptive", lambda: pairs, dict))
    assert value(registry, "ridgeline_kv_pair", transport="grpc", why="on another host") == 64 * 63 - 1
    assert value(registry, "ridgeline_kv_pair", transport="shm", why="") == 1
    assert value(registry, "ridgeline_link_bytes_total", transport="grpc") == 999e6
    assert value(registry, "ridgeline_link_seconds_total", transport="grpc") == 499.5
    assert value(registry, "ridgeline_link_bytes_per_second_bucket", transport="grpc", le="1e+07") == 999
    assert len(samples(registry)) < 64 * 10
    assert not [name for name in names(registry) if name.endswith("_created")]


def test_a_worker_that_has_left_leaves_no_series(registry):
    restarts = {("decode", "decode-0", "stalled"): 2, ("decode", "has-left", "ordered"): 1}
    workers = [worker("decode", "decode-0")]
    registry.register(WorkerCollector(lambda: workers, dict, lambda: "disaggregated", list, lambda: restarts))
    assert value(registry, "ridgeline_worker_restarts_total", pool="decode", worker="decode-0", reason="stalled") == 2
    assert "has-left" not in generate_latest(registry).decode()


def test_workers_that_are_lost_again_and_again_are_counted(registry):
    away = {"worker-1": "lost more than 5 times"}
    registry.register(WorkerCollector(list, dict, lambda: "adaptive", list, dict, lambda: away))
    assert value(registry, "ridgeline_away_workers") == 1
    away.clear()
    assert value(registry, "ridgeline_away_workers") == 0


def test_how_many_workers_are_wanted_is_told_by_pool_once_that_is_known(registry):
    wanted = {}
    registry.register(WorkerCollector(list, dict, lambda: "adaptive", list, dict, wanted=lambda: wanted))
    assert "ridgeline_wanted_workers" not in generate_latest(registry).decode()
    wanted["decode"] = 3
    assert value(registry, "ridgeline_wanted_workers", pool="decode") == 3
