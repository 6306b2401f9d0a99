"""From what servers publish to the figures by which a bottleneck is named; what the router takes; who split."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.loadtest.report import pools
from ridgeline.loadtest.report.pools import engines_sentence, fleet_state, roles_of, router_share, split_fraction
from ridgeline.loadtest.run import server_metrics
from ridgeline.loadtest.run.server_metrics import MetricsDelta, Watch, difference, parse_metrics
from ridgeline.roofline.bottleneck import bottleneck
from tests.support.series_table import documented

URL, OTHER = "http://one", "http://other"


def series(counters="", gauges=""):
    """Samples in Prometheus' text format, each with its type."""
    lines = [
        (text.strip(), kind) for lines, kind in ((counters, "counter"), (gauges, "gauge")) for text in lines.split("\n")
    ]
    return "".join(typed(line, kind) for line, kind in lines if line)


def typed(line, kind):
    name = re.split(r"[{ ]", line)[0]
    family = re.sub("_(sum|count)$", "", name)
    return f"# TYPE {family} {kind if family == name else 'histogram'}\n{line}\n"


def seen(counters, gauges="", levels=(), wall_s=10.0):
    """What was counted in ten seconds in which the gauges were read, each of `levels` once."""
    watch = Watch(parse_metrics("", foreign=True))
    watch.after = parse_metrics(series(counters, gauges), foreign=True)
    for level in levels:
        watch.read(parse_metrics(series("", level), foreign=True).gauges)
    delta = watch.delta(wall_s)
    assert delta is not None
    return delta


OWN = """
    ridgeline_requests_total{path="disaggregated",outcome="finished"} 40
    ridgeline_busy_seconds_total{pool="prefill",worker="0",step="prefill"} 4
    ridgeline_busy_seconds_total{pool="decode",worker="1",step="decode"} 9
    ridgeline_flops_total{pool="decode",worker="1",step="decode"} 900
    ridgeline_bytes_total{pool="decode",worker="1",step="decode",kind="weights"} 1440
    ridgeline_link_seconds_total{transport="shm"} 2
    ridgeline_stage_seconds_sum{stage="wire"} 2
    ridgeline_stage_seconds_count{stage="wire"} 40
    ridgeline_text_tokens_total 3000
    ridgeline_text_events_total 2000
"""
GAUGES = """
    ridgeline_workers{pool="prefill"} 1
    ridgeline_workers{pool="decode"} 1
    ridgeline_peak_flops{pool="decode"} 1000
    ridgeline_peak_bytes_per_second{pool="decode"} 200
    ridgeline_kv_blocks{pool="decode",worker="1"} 100
    ridgeline_max_num_seqs{pool="decode",worker="1"} 16
"""


def level(running, waiting, fetching, free):
    return f"""
        ridgeline_running{{pool="decode",worker="1"}} {running}
        ridgeline_waiting{{pool="decode",worker="1"}} {waiting}
        ridgeline_waiting_prompts{{pool="decode"}} 1
        ridgeline_active_fetches{{pool="decode",worker="1"}} {fetching}
        ridgeline_kv_blocks_free{{pool="decode",worker="1"}} {free}
    """


def test_the_figures_of_ridgelines_pools_are_read_from_its_series():
    delta = seen(OWN, GAUGES, [level(10, 2, 2, 60), level(14, 6, 2, 20)])
    state = fleet_state({URL: delta}, 1.0, 0.5)
    prefill, decode = state.pools[1], state.pools[0]
    assert (decode.pool, prefill.pool) == ("decode", "prefill")
    assert (decode.workers, decode.busy, decode.mfu, decode.mbu) == (1, 0.9, 0.1, 0.8)
    assert (decode.kv_used, decode.running, decode.places) == (pytest.approx(0.6), 12, 16)
    assert decode.waiting == 1 + 2, "two sequences of its engine wait for their KV, not for room"
    assert (prefill.busy, prefill.waiting, prefill.kv_used) == (0.4, None, None)
    assert (state.requests, state.link_busy, state.wire_s, state.handoff_wait_s) == (40, 0.2, 0.05, None)
    assert (state.tokens_per_event, state.router_cores) == (1.5, None)
    assert bottleneck(replace(state, tokens_per_event=1.0)).resource == "bandwidth"


def test_levels_that_were_not_read_and_events_too_few_to_tell_are_not_known():
    state = fleet_state({URL: seen(OWN, GAUGES, wall_s=100.0)})
    assert (state.pools[0].kv_used, state.pools[0].running, state.pools[0].waiting) == (None, None, None)
    assert state.tokens_per_event is None
    assert bottleneck(state).resource == "unknown"


VLLM = """
    vllm:request_success_total{finished_reason="length"} 10
    vllm:num_preemptions_total{engine="0"} 0
"""


def vllm_level(running, capacity, used):
    return f"""
        vllm:num_requests_running{{engine="0"}} {running}
        vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} {capacity}
        vllm:num_requests_waiting_by_reason{{engine="0",reason="deferred"}} 9
        vllm:kv_cache_usage_perc{{engine="0"}} {used}
    """


def test_vllms_engines_are_busy_while_something_runs():
    levels = [vllm_level(*each) for each in ((8, 0, 0.3), (8, 4, 0.5), (0, 0, 0.0), (0, 0, 0.0))]
    state = fleet_state({URL: seen(VLLM, levels=levels), OTHER: seen(VLLM, levels=levels)}, 1.0, 1.0)
    (engine,) = state.pools
    assert (engine.pool, engine.workers, engine.busy, engine.running, engine.waiting) == ("engine", 2, 0.5, 4, 2)
    assert (engine.kv_used, engine.preemptions, engine.mfu, state.requests) == (pytest.approx(0.2), 0, None, 20)
    assert bottleneck(state).resource == "queue"


@pytest.mark.parametrize(
    ("running", "tpot", "sentence"),
    [
        (8, 1.0, "Engine is short of places: 8 of 8 run, 4 wait: raise max_num_seqs."),
        (4, 0.5, "Engine is short of workers: busy 100%: add one engine worker."),
    ],
)
def test_what_vllms_engines_are_short_of_is_named_by_their_places_and_by_what_runs(running, tpot, sentence):
    delta = seen(VLLM, levels=[vllm_level(running, 4, 0.5)])
    assert bottleneck(fleet_state({URL: delta}, 1.0, tpot, places=8)).sentence == sentence


def test_how_busy_an_engine_is_that_prefills_is_not_known_but_its_queue_is():
    prefill = replace(vllm_pd(10, 5000, 0), levels=seen(VLLM, levels=[vllm_level(1, 3, 0.02)]).levels)
    decode = replace(vllm_pd(640, 500, 4500), levels=seen(VLLM, levels=[vllm_level(9, 0, 0.1)]).levels)
    state = fleet_state({URL: prefill, OTHER: decode}, 0.5, 1.0, places=72)
    assert [pool.busy for pool in state.pools] == [None, 1.0]
    assert bottleneck(state).sentence == (
        "Cannot be told: prefill publishes no busy time; 3 wait, 2% of KV blocks in use, 1% of places."
    )


def test_sglangs_engines_say_their_role():
    gauges = """
        sglang:num_running_reqs{engine_type="decode"} 4
        sglang:num_queue_reqs{engine_type="decode"} 3
        sglang:token_usage{engine_type="decode"} 0.97
    """
    delta = seen("sglang:num_requests_total 5", gauges, [gauges])
    (engine,) = fleet_state({URL: delta}).pools
    assert (engine.pool, engine.running, engine.waiting, engine.kv_used) == ("decode", 4, 3, 0.97)
    assert bottleneck(fleet_state({URL: delta})).resource == "kv_blocks"


def vllm_pd(generated, local, moved, done=9, failed=0):
    return seen(f"""
        vllm:nixl_xfer_time_seconds_count {done}
        vllm:nixl_num_failed_transfers_total {failed}
        vllm:request_success_total{{finished_reason="length"}} 10
        vllm:generation_tokens_total {generated}
        vllm:prompt_tokens_by_source_total{{source="local_compute"}} {local}
        vllm:prompt_tokens_by_source_total{{source="external_kv_transfer"}} {moved}
    """)


def decided(name):
    kinds = "decode-only", "prefill-decode", "encode-prefill-decode"
    return seen(
        "\n".join(f'{name}{{decision_type="{kind}"}} {count}' for kind, count in zip(kinds, (1, 2, 1), strict=True))
    )


@pytest.mark.parametrize(
    ("deltas", "share"),
    [
        ({URL: seen(OWN, GAUGES)}, 1.0),
        ({URL: vllm_pd(10, 5000, 0), OTHER: vllm_pd(640, 500, 4500)}, 0.9),
        ({URL: vllm_pd(10, 5000, 0), OTHER: vllm_pd(640, 500, 4500, 6, 3)}, pytest.approx(0.6)),
        ({URL: vllm_pd(640, 5000, 0), OTHER: vllm_pd(640, 5000, 0)}, 0.0),
        ({URL: decided("llm_d_epp_disagg_decision_total")}, 0.75),
        ({URL: decided("llm_d_inference_scheduler_disagg_decision_total")}, 0.75),
        ({URL: seen("")}, None),
    ],
)
def test_the_share_that_went_through_both_pools_is_told_by_each_servers_own_series(deltas, share):
    assert split_fraction(deltas) == share


def test_a_server_whose_requests_end_after_one_token_prefills_for_others():
    assert roles_of({URL: vllm_pd(10, 5000, 0), OTHER: vllm_pd(640, 500, 4500)}) == {URL: "prefill", OTHER: "decode"}
    assert roles_of({URL: vllm_pd(10, 5000, 0)}) == {URL: "engine"}


LATENCIES = """
    ridgeline_requests_total{path="disaggregated",outcome="finished"} 10
    ridgeline_ttft_seconds_sum{pool="prefill"} 8
    ridgeline_ttft_seconds_count{pool="prefill"} 10
    ridgeline_stage_seconds_sum{stage="preprocess"} 1
    ridgeline_stage_seconds_sum{stage="queue"} 2
    ridgeline_stage_seconds_sum{stage="prefill"} 4
    ridgeline_itl_seconds_sum{pool="decode"} 20
    ridgeline_itl_seconds_count{pool="decode"} 1000
    ridgeline_text_seconds_total 5
    ridgeline_text_events_total 1000
    process_cpu_seconds_total 7
"""


def test_the_router_takes_what_is_neither_queue_nor_engine():
    share = router_share(seen(LATENCIES), mean_ttft_s=1.0, mean_latency_s=2.0)
    assert (share.ttft, share.ttft_at_most) == (pytest.approx(0.1 + 0.2), pytest.approx(0.4))
    assert (share.itl, share.cpu_cores) == (pytest.approx(0.25), 0.7)
    assert (
        share.sentence
        == "Router and network take 30% of TTFT and 25% of ITL, which is much; the router uses 0.70 cores."
    )
    assert "much" not in replace(share, ttft=0.1, itl=None).sentence
    assert replace(share, ttft=None, itl=None).sentence == ""


def test_the_routers_part_is_not_known_without_its_series_and_where_decode_makes_first_tokens():
    unknown = router_share(MetricsDelta({}, {}, 10.0), 1.0, 2.0)
    assert (unknown.ttft, unknown.ttft_at_most, unknown.itl, unknown.cpu_cores, unknown.sentence) == (*[None] * 4, "")
    resampled = seen(LATENCIES + 'ridgeline_first_token_total{mode="resample",reason="seed"} 3')
    assert router_share(resampled, 1.0, 2.0).ttft is None


def test_what_one_router_counts_for_itself_is_left_out_if_another_one_answers():
    first = parse_metrics(
        series("process_cpu_seconds_total 9\nridgeline_text_events_total 9", "process_start_time_seconds 1")
    )
    counters = "process_cpu_seconds_total 12\nridgeline_text_events_total 8\nridgeline_requests_total 4"
    again = difference(
        first, parse_metrics(series(counters.replace(" 8", " 10"), "process_start_time_seconds 1")), 10.0
    )
    assert (again.total("process_cpu_seconds_total"), again.total("ridgeline_text_events_total")) == (3, 1)
    other = difference(first, parse_metrics(series(counters, "process_start_time_seconds 2")), 10.0)
    assert [name for name, _ in other.counters] == ["ridgeline_requests_total"]


@pytest.mark.parametrize("module", [pools, server_metrics])
def test_every_series_of_ridgelines_that_is_read_is_one_that_a_router_publishes(module):
    read = set(re.findall(r'"(ridgeline_[a-z_]+[a-z])"', Path(module.__file__).read_text()))
    assert read
    assert {re.sub(r"_(sum|count)$", "", name) for name in read} <= documented().keys()


def test_what_foreign_engines_counted_is_told_as_far_as_they_counted_it():
    vllm = seen(
        """
        vllm:prefix_cache_queries_total{engine="0"} 400
        vllm:prefix_cache_hits_total{engine="0"} 100
        vllm:num_preemptions_total{engine="0"} 2
        """,
        levels=['vllm:num_requests_running{engine="0"} 3\nvllm:kv_cache_usage_perc{engine="0"} 0.5'] * 2,
    )
    assert engines_sentence({URL: vllm}) == (
        "25% of prompt tokens from the prefix cache; engine: KV blocks 50% used, 2 preemptions."
    )
    assert engines_sentence({URL: seen(OWN, GAUGES)}) == ""
