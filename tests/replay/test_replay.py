"""Replay and comparison against a real local HTTP server with known timing."""

import asyncio
import contextlib
import html
import io
import json
import os
import re
import statistics
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from plotly.offline import get_plotlyjs
from rich.console import Console

from ridgeline.cluster.commands import replay as replay_command_module
from ridgeline.cluster.commands.replay import replay_command
from ridgeline.loadtest.compare import compare
from ridgeline.loadtest.errors import LoadTestError, NotDisaggregatedError, ServerError
from ridgeline.loadtest.plan import ComparePlan, ReplayPlan, Slo
from ridgeline.loadtest.preparation import prepare
from ridgeline.loadtest.report.replay_output import report_replay
from ridgeline.loadtest.run import replay as replay_module
from ridgeline.loadtest.run.calibration import Workers, given_load, most_rate
from ridgeline.loadtest.run.records import RecordFile
from ridgeline.loadtest.run.replay import ReplayResult, run_replay
from ridgeline.loadtest.run.unloaded import Unloaded, measure_unloaded, sizes_of
from ridgeline.loadtest.run_folder import RunFolder
from ridgeline.loadtest.valid_rounds import RoundRunner
from ridgeline.loadtest.variants import Deployments
from tests.support.openai_server import Behaviour, Ready, running
from tests.support.patience import PATIENCE_S, eventually
from tests.support.summary_schema import schema_problems

MOST_TRIES = 8
"""Of what needs a machine that does not stand still for a tenth of a second."""
SIX = "poisson:rate=50,input=40,output=6,n=6,seed=1"


pytestmark = pytest.mark.usefixtures("plain_tokens")


@pytest.fixture
def console():
    with Path("/dev/null").open("w") as nowhere:
        yield Console(file=nowhere)


def _plan(**fields) -> ReplayPlan:
    return ReplayPlan(**{"trace": SIX, "settle_s": 0.02, "tokenizer": "unused"} | fields)


async def _replay(behaviour: Behaviour, console: Console, **fields) -> ReplayResult:
    with running(behaviour) as url:
        return await run_replay(url, _plan(**fields), console)


async def test_ttft_tpot_and_second_token_are_the_servers_true_times(console):
    medians = []
    for _ in range(MOST_TRIES):
        result = await _replay(Behaviour(ttft_s=0.1, tpot_s=0.04), console)
        assert [record.error for record in result.records] == [None] * 6
        for record in result.records:
            assert record.ttft_s <= record.second_token_s <= record.latency_s
            assert len(record.itls_s) == 5
            assert sum(record.itls_s) == pytest.approx(record.latency_s - record.ttft_s)
            assert (record.input_tokens, record.output_tokens, record.finish_reason) == (40, 6, "length")
            assert record.latency_s >= 0.3, "the server's pauses are no shorter, whatever else the machine does"
        names = ("ttft_s", "tpot_s", "latency_s")
        medians.append([statistics.median(getattr(record, name) for record in result.records) for name in names])
        ttft_s, tpot_s, latency_s = medians[-1]
        if 0.09 < ttft_s < 0.25 and 0.035 < tpot_s < 0.08 and 0.28 < latency_s < 0.6:
            return
    pytest.fail(f"medians of {names} in each try: {medians}")


async def test_requests_are_token_exact_greedy_and_leave_out_the_warm_up(console):
    behaviour = Behaviour(ttft_s=0.01, tpot_s=0.002)
    result = await _replay(behaviour, console, warmup_requests=3)
    assert len(behaviour.bodies) == 9
    assert len(result.records) == 6
    assert [len(prompt) for prompt in behaviour.prompts] == [40] * 9
    assert len({tuple(prompt[:16]) for prompt in behaviour.prompts}) == 9
    wanted = {"max_tokens": 6, "ignore_eos": True, "temperature": 0, "stream": True}
    assert wanted.items() <= behaviour.bodies[-1].items()
    assert behaviour.bodies[-1]["stream_options"] == {"include_usage": True}
    assert result.metrics.total("ridgeline_requests_total") == 6


async def test_load_is_open_a_slow_server_does_not_delay_the_sending(console):
    trace = "poisson:rate=40,input=20,output=2,n=10,seed=2"
    result = await _replay(Behaviour(ttft_s=0.0, answers_after_requests=10), console, trace=trace, warmup_requests=0)
    assert [record.ok for record in result.records] == [True] * 10


async def test_a_client_that_cannot_keep_up_is_warned_about(console, monkeypatch):
    monkeypatch.setattr(replay_module, "MAX_SEND_LAG_S", -1.0)
    result = await _replay(Behaviour(ttft_s=0.01), console, warmup_requests=0)
    assert "send lag" in result.warnings[0]


async def test_the_client_tells_its_own_load(console):
    core = max(os.sched_getaffinity(0))
    result = await _replay(Behaviour(ttft_s=0.05), console, warmup_requests=0, client_cores=str(core))
    assert result.client.cores == (core,)
    assert 0 < result.client.cpu_share < 1.5
    assert 0 <= result.client.loop_lag_p50_ms <= result.client.loop_lag_p99_ms <= result.client.loop_lag_max_ms
    assert result.client.events_per_s * result.duration_s == pytest.approx(6 * 8)
    assert result.client.niceness == os.nice(0)


async def test_a_client_process_that_dies_is_told_and_keeps_the_records_it_has_sent(console, tmp_path):
    behaviour = Behaviour(ttft_s=0.01, faults={3: "hang"})
    record_file = RecordFile(tmp_path / "out" / "records.jsonl", mode="colocated")
    with running(behaviour) as url:
        plan = _plan(warmup_requests=0)
        task = asyncio.create_task(run_replay(url, plan, console, record_file=record_file))
        path = tmp_path / "out" / "records.jsonl"
        await eventually(lambda: path.exists() and len(path.read_text().splitlines()) == 5)
        (child,) = [
            each for each in psutil.Process().children() if "ridgeline.loadtest.run.client.process" in each.cmdline()
        ]
        child.kill()
        with pytest.raises(LoadTestError, match="the client process ended with status -9"):
            await task
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(records) == 5
    assert len({record["index"] for record in records} & set(range(6))) == 5, "the one that arrived fourth hangs"
    assert {record["mode"] for record in records} == {"colocated"}


async def test_a_chat_counts_its_tokens_and_not_the_event_that_names_the_role(console, monkeypatch):
    monkeypatch.setattr(replay_module, "prompt_text", lambda _, prompt, most: " ".join(map(str, prompt[:most])))
    behaviour = Behaviour(ttft_s=0.05, tpot_s=0.002)
    result = await _replay(behaviour, console, warmup_requests=0, endpoint="chat")
    assert [record.error for record in result.records] == [None] * 6
    for record in result.records:
        assert record.ttft_s >= 0.05
        assert len(record.itls_s) == 5
        assert record.finish_reason == "length"
    (message,) = behaviour.bodies[-1]["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 40


async def test_a_turn_with_a_time_of_its_own_leaves_no_earlier(console, tmp_path):
    turns = [{"timestamp": 0}, {"timestamp": 300}, {"timestamp": 310}]
    lines = [json.dumps({"session_id": "a", "input_length": 20, "output_length": 3} | turn) for turn in turns]
    (tmp_path / "sessions").write_text("\n".join(lines))
    plan = {"trace": str(tmp_path / "sessions"), "warmup_requests": 0}
    result = await _replay(Behaviour(ttft_s=0.05, tpot_s=0.005), console, **plan)
    first, second, third = result.records
    assert first.sent_s + first.latency_s < 0.3 + PATIENCE_S
    assert second.scheduled_s >= 0.3
    assert third.scheduled_s >= second.sent_s + second.latency_s, "its time was past when the answer before it came"


async def test_completions_may_be_sent_as_text(console, monkeypatch):
    monkeypatch.setattr(replay_module, "prompt_text", lambda _, prompt, most: " ".join(map(str, prompt[:most])))
    behaviour = Behaviour(ttft_s=0.001, tpot_s=0.001)
    await _replay(behaviour, console, warmup_requests=1, text_prompts=True)
    assert [len(body["prompt"].split()) for body in behaviour.bodies[1:]] == [40] * 7


@pytest.mark.parametrize(
    ("fault", "error", "status"),
    [
        ("refuse", "HTTP 503", 503),
        ("error", "engine died", 200),
        ("cut", "ended before [DONE]", 200),
        ("disconnect", "ClientPayloadError", 200),
        ("hang", "deadline of 4 s", 200),
        ("short", "2 tokens, and 6 were asked for", 200),
    ],
)
async def test_a_failed_request_is_a_record_and_harms_no_other(console, fault, error, status):
    behaviour = Behaviour(ttft_s=0.01, tpot_s=0.002, faults={2: fault})
    result = await _replay(behaviour, console, warmup_requests=0, deadline_s=4.0)
    failed = [record for record in result.records if not record.ok]
    assert len(failed) == 1
    assert error in failed[0].error
    assert failed[0].status == status
    assert any("1 of 6 requests failed" in warning for warning in result.warnings)


async def test_cancelling_a_replay_ends_its_requests_at_once(console):
    behaviour = Behaviour(ttft_s=PATIENCE_S)
    with running(behaviour) as url:
        task = asyncio.create_task(run_replay(url, _plan(warmup_requests=0), console))
        await asyncio.to_thread(behaviour.wait_for_requests, 6)
        start = time.perf_counter()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.perf_counter() - start < PATIENCE_S / 2
        assert len(asyncio.all_tasks()) == 1


async def test_a_server_that_is_not_there_or_fails_its_warm_up_is_named(console):
    with pytest.raises(ServerError, match="no OpenAI-compatible server answers"):
        await run_replay("http://127.0.0.1:9", _plan(), console)
    with pytest.raises(ServerError, match="warm-up request 1 of 2 failed: HTTP 503"):
        await _replay(Behaviour(faults={0: "refuse"}), console)
    with pytest.raises(ServerError, match="it serves fake"):
        await _replay(Behaviour(), console, served_model_name="other")


async def test_a_server_without_our_metrics_can_be_replayed(console, tmp_path):
    result = await _replay(Behaviour(ttft_s=0.01, has_metrics=False), console)
    assert result.metrics is None
    report_replay(result, _plan(), given_load(_plan(), result.trace), tmp_path, console)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["completed"] == 6
    assert "pools" not in summary
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 6


async def test_a_replay_of_our_server_reports_its_pools(console):
    result = await _replay(Behaviour(ttft_s=0.01), console)
    summary = report_replay(result, _plan(), given_load(_plan(), result.trace), None, console)
    assert summary["pools"]["prefill"]["arithmetic_intensity"] == pytest.approx(50)
    assert summary["disaggregated_fraction"] == 1.0
    assert summary["client"]["cpu_share"] == result.client.cpu_share > 0


class _Cluster:
    """Stands in for cluster/: starts a fake server in the mode asked for and remembers it."""

    def __init__(self, **disaggregated) -> None:
        self.started: list[Behaviour] = []
        self.disaggregated = disaggregated

    @contextlib.asynccontextmanager
    async def serve(self, mode):
        behaviour = Behaviour(ttft_s=0.06, tpot_s=0.05, mode=mode)
        if mode == "disaggregated":
            behaviour = Behaviour(mode=mode, **{"ttft_s": 0.06, "tpot_s": 0.005} | self.disaggregated)
        self.started.append(behaviour)
        with running(behaviour) as url:
            yield url

    async def compare(self, plan, out, console, **options):
        async with Deployments(self.serve) as deployments:
            variants = [deployments.variant(mode) for mode in plan.modes]
            return await compare(variants, plan, out, console, **{"is_alone": False} | options)


def _compare_plan(**fields) -> ComparePlan:
    plain = {"trace": SIX, "settle_s": 0.02, "tokenizer": "unused", "slo_tpot_ms": 40, "rate": 50}
    plain |= {"variants": "colocated,disaggregated"}
    # No round is discarded, and repeated, because of a late client: it may be late by 4 s.
    return ComparePlan(**plain | {"slo_ttft_ms": 200_000, "pairs": 2} | fields)


def _summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


async def test_three_pairs_tell_a_slow_variant_from_a_fast_one_and_everything_is_written(tmp_path, console):
    fast, slow = Behaviour(ttft_s=0.01, tpot_s=0.001), Behaviour(ttft_s=0.01, tpot_s=0.06, mode="colocated")
    # A machine that stands still for a second adds that to the 20 gaps of a fast answer, which may last 1.1 s, or hides
    # one of a slow answer's, of which 19 last longer than that. If only the client does, it takes some for fast.
    plan = _compare_plan(trace=SIX.replace("output=6", "output=21"), slo_tpot_ms=55, pairs=3)
    with running(slow) as one, running(fast) as other:
        variants = Ready(one), Ready(other, "disaggregated")
        await compare(variants, plan, tmp_path, console, is_alone=False)
    summary = _summary(tmp_path)
    assert schema_problems(summary) == []
    a, b = summary["variants"]["a"], summary["variants"]["b"]
    assert summary["verdict"]["variants"] == ["disaggregated", "colocated"]
    assert summary["verdict"]["serves_more"] == [["disaggregated", "colocated"]]
    assert summary["verdict"]["sentences"][0] == (
        "Disaggregated serves more requests within the SLOs than colocated (strong evidence)."
    )
    assert a["points"][0]["attainment"] < 0.1
    assert (b["points"][0]["attainment"], b["max_goodput_rate"]["outcome"]) == (1.0, "above")
    assert (a["label"], b["label"]) == ("colocated", "disaggregated")
    assert b["disaggregated_fraction"] == 1.0
    assert "disaggregated_fraction" not in a
    assert set(b["pools"]) == {"prefill", "decode"}
    decode = b["pools"]["decode"]
    assert decode["arithmetic_intensity"] == pytest.approx(2)
    assert decode["mfu"] == pytest.approx(2e6 / (0.001 / 4) / 1e10)
    orders = [summary["rounds"][place]["variant"] for place in range(0, 6, 2)]
    assert set(orders) == {"a", "b"}, "the order is random"

    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert len(records) == 36
    assert {(each["variant"], each["pair"]) for each in records} == {
        (variant, pair) for variant in "ab" for pair in range(3)
    }
    by_pair = {(each["variant"], each["pair"]): [] for each in records}
    for each in records:
        by_pair[each["variant"], each["pair"]].append(each["scheduled_s"])
    for times_s in by_pair.values():
        times_s.sort()  # records are written as requests end
    assert all(by_pair["a", pair] == by_pair["b", pair] for pair in range(3)), "the same arrivals within a pair"
    assert len({tuple(times) for times in by_pair.values()}) == 3, "and others in each pair"
    prompts = [tuple(prompt) for each in (slow, fast) for prompt in each.prompts]
    assert len(set(prompts)) == len(prompts), "and no prompt twice, so caches are cold"

    page = (tmp_path / "report.html").read_text()
    titles = re.findall(r'<div class="card plot"><h2>(.*?)</h2><p class="legend">(.*?)</p>', page)
    assert len(titles) == page.count("Plotly.newPlot("), "each with its legend, where neither can cover the other"
    assert titles[0][0] == "Requests within the SLOs against rate"
    assert "http" not in page.replace(get_plotlyjs(), "")


async def test_a_mode_against_itself_is_restarted_as_two_modes_are_and_named_by_place(tmp_path, console):
    cluster = _Cluster()
    plan = _compare_plan(variants="colocated,colocated", slo_tpot_ms=0.001)
    await cluster.compare(plan, tmp_path, console)
    assert len(cluster.started) >= 3
    assert {behaviour.mode for behaviour in cluster.started} == {"colocated"}
    summary = _summary(tmp_path)
    assert [one["label"] for one in summary["variants"].values()] == ["colocated (a)", "colocated (b)"]
    assert summary["verdict"]["serves_more"] == []
    assert "out of reach" in summary["verdict"]["sentences"][0]


async def test_a_server_that_has_started_is_warmed_up_until_each_worker_has_stepped(tmp_path, console):
    cluster = _Cluster()
    await cluster.compare(_compare_plan(pairs=1), tmp_path, console)
    for behaviour in cluster.started:
        assert len(behaviour.prompts) == 4 + 6, "a wave, then a round of six requests"


async def test_a_round_in_which_a_worker_was_lost_is_void_and_repeated(tmp_path, console):
    behaviour = Behaviour(ttft_s=0.01, tpot_s=0.001, mode="colocated")

    def lose_a_worker(number: int) -> None:
        if number == 2:
            behaviour.restarts_at = len(behaviour.bodies) + 3

    with running(behaviour) as url:
        variants = Ready(url), Ready(url, at_round=lose_a_worker)
        plan = _compare_plan(variants="colocated,colocated")
        await compare(variants, plan, tmp_path, console, is_alone=False)
    rounds = _summary(tmp_path)["rounds"]
    assert [each["valid"] for each in rounds].count(False) == 1
    discarded = next(each for each in rounds if not each["valid"])
    assert discarded["variant"] == "b"
    assert discarded["reasons"] == ["0 was restarted during the round"]
    assert "discarded: 0 was restarted" in (tmp_path / "report.html").read_text()
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert sum(each["round"] == discarded["round"] for each in records) == 6
    assert sum(each["completed"] for each in rounds if each["valid"] and each["variant"] == "b") == 12


async def test_a_machine_that_is_always_disturbed_gives_rounds_that_are_kept_and_marked(tmp_path, console, monkeypatch):
    monkeypatch.setattr(
        "ridgeline.loadtest.valid_rounds.discard_reasons", lambda *_: ("other work took 40% of the time",)
    )
    with running(Behaviour(ttft_s=0.01, tpot_s=0.001, mode="colocated")) as url:
        plan = _compare_plan(variants="colocated,colocated")
        await compare((Ready(url), Ready(url)), plan, tmp_path, console, is_alone=False)
    assert "Nothing is concluded from 0 pairs" in _summary(tmp_path)["verdict"]["sentences"][0]
    rounds = _summary(tmp_path)["rounds"]
    assert [each["valid"] for each in rounds] == [False] * 2 + [True] * 4
    assert all(each["reasons"] for each in rounds)


async def test_a_server_that_loses_workers_in_every_round_ends_the_comparison(tmp_path, console):
    behaviour = Behaviour(ttft_s=0.01, tpot_s=0.001, mode="colocated", restarts_every=3)
    with running(behaviour) as url, pytest.raises(ServerError, match="was discarded 3 times: 0 was restarted"):
        await compare((Ready(url), Ready(url)), _compare_plan(), tmp_path, console, is_alone=False)


async def test_a_round_in_which_nothing_finished_counts_and_is_no_error(tmp_path, console):
    refused = (*range(4, 10), *range(14, 20))  # the others warm the workers up
    behaviour = Behaviour(ttft_s=0.01, tpot_s=0.001, faults=dict.fromkeys(refused, "refuse"))
    with running(behaviour) as url:
        variants = Ready(url, "disaggregated"), Ready(url, "disaggregated")
        settled = await prepare(variants[0], _compare_plan(), console, None, (), 0.0)
        RunFolder(tmp_path).start(settled)
        runner = RoundRunner(variants, RunFolder(tmp_path).past(), console, is_alone=False, began_s=0.0)
        found = await runner.pair(0, settled.traces.at_rate(0, 50, 6), "far too fast")
    assert [record.ok for result in found.values() for record in result.records] == [False] * 12


async def test_compare_measures_once_before_round_one_and_both_variants_get_the_same_rate_and_limits(tmp_path, console):
    cluster = _Cluster()
    plan = ComparePlan(
        variants="colocated,disaggregated",
        trace="poisson:rate=1,input=40,output=12,n=30,seed=1",
        rate="auto",
        slo="auto",
        budget_s=0.1,
        settle_s=0.02,
        tokenizer="unused",
    )
    await cluster.compare(plan, tmp_path, console, workers=Workers(prefill=2, decode=2), notes=("others work here",))
    first = cluster.started[0]
    prompts = [tuple(prompt) for each in cluster.started for prompt in each.prompts]
    assert len(set(prompts)) == len(prompts), "what was measured is in no round's prefix cache"
    summary = _summary(tmp_path)
    load = summary["load"]
    assert load["notes"][0] == "others work here"
    assert any("too few for a verdict" in note for note in load["notes"])
    assert load["unloaded"]["median_ttft_s"] >= first.ttft_s
    assert load["unloaded"]["median_tpot_s"] >= first.tpot_s
    assert {summary["plan"]["rate"], *(each["rate"] for each in summary["rounds"])} == {load["rate"]}
    unloaded = msgspec.convert(load["unloaded"], Unloaded)
    most, _ = most_rate(sizes_of(plan), unloaded, Workers(prefill=2, decode=2), Slo(**summary["slo"]))
    assert load["rate"] == pytest.approx(0.8 * most, rel=0.01), "by the workers of the split, not the replicas measured"
    assert summary["slo"]["ttft_ms"] == pytest.approx(5e3 * load["unloaded"]["median_ttft_s"], rel=0.01)
    assert summary["slo"]["tpot_ms"] == pytest.approx(2.5e3 * load["unloaded"]["median_tpot_s"], rel=0.01)
    assert {each["total"] for each in summary["rounds"]} == {summary["plan"]["limit"]}
    assert len([each for each in summary["rounds"] if each["valid"]]) == 2, "the first pair is run in any case"
    page = (tmp_path / "report.html").read_text()
    for sentence in load["sentences"]:
        assert html.escape(sentence[1:]) in page


async def test_a_running_server_is_measured_by_its_own_pools(console):
    plan = _plan(rate="auto", slo="auto")
    with running(Behaviour(ttft_s=0.05, tpot_s=0.01)) as url:
        unloaded = await measure_unloaded(url, plan, console, round_index=1)
    assert unloaded.workers == {"prefill": 1, "decode": 1}
    assert unloaded.input_tokens == (40,) * 5
    assert unloaded.output_tokens == 8
    assert unloaded.mean_ttft_s >= 0.05
    assert unloaded.median_batch_gap_s >= 0.009


async def test_the_batch_is_measured_while_all_its_answers_run_however_late_the_last_prompt_is(console):
    behaviour = Behaviour(ttft_s=0.1, tpot_s=0.01, mode="colocated")
    with running(behaviour) as url:
        await measure_unloaded(url, _plan(rate="auto"), console, round_index=1)
    sizes = [body["max_tokens"] for body in behaviour.bodies]
    assert sizes[:6] == [4, 8, 8, 8, 8, 8]
    assert len(sizes[6:]) == 16, "eight for each of two workers"
    assert min(sizes[6:]) >= 8 + 20, "eight prompts in turn take the time of 80 tokens, of fewer if those are slow"


async def test_a_long_wait_for_the_measurement_or_the_warm_up_is_not_silent(monkeypatch):
    monkeypatch.setattr("ridgeline.loadtest.run.progress.LINE_EVERY_S", 0.02)
    monkeypatch.setattr(replay_command_module, "check_client", lambda _: None)  # there is no tokenizer to load
    console = Console(file=io.StringIO(), width=200)
    with running(Behaviour(ttft_s=0.1, tpot_s=0.005)) as url:
        await replay_command(url, _plan(slo="auto"), None, console)
    text = console.file.getvalue()
    assert [f"measuring: {done}/14 done, 1 in flight" in text for done in range(6)] == [True] * 6
    assert "measuring: 14/14 done, 0 in flight" in text
    assert "replay: 0/6 done, warming up" in text
    assert "replay: 6/6 done, 0 in flight" in text


async def test_a_replay_says_where_it_wrote_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr(replay_command_module, "check_client", lambda _: None)  # there is no tokenizer to load
    console = Console(file=io.StringIO(), width=200)
    with running(Behaviour(ttft_s=0.01, tpot_s=0.001)) as url:
        for folder in ("one", "one-2"):
            await replay_command(url, _plan(), tmp_path / "one", console)
            last = console.file.getvalue().splitlines()[-1]
            assert last == f"wrote summary.json, records.jsonl and records.parquet in {tmp_path / folder}"
            assert sorted(file.name for file in (tmp_path / folder).iterdir()) == [
                "records.jsonl",
                "records.parquet",
                "summary.json",
            ]


async def test_prompts_that_fill_the_context_are_shortened_by_the_answer_that_is_measured(console):
    behaviour = Behaviour(ttft_s=0.001, tpot_s=0.001, max_model_len=42, has_metrics=False)
    with running(behaviour) as url:
        trace = "poisson:rate=1,input=40,output=2,n=9"
        unloaded = await measure_unloaded(url, _plan(rate="auto", trace=trace), console, round_index=1)
    assert unloaded.input_tokens == (34,) * 5
    assert unloaded.workers == {}


async def test_a_server_that_fails_while_it_is_measured_is_named(console):
    failed = "of 40 tokens to the idle server failed while it was measured: HTTP 503"
    with running(Behaviour(ttft_s=0.01, faults={3: "refuse"})) as url, pytest.raises(ServerError, match=failed):
        await measure_unloaded(url, _plan(slo="auto"), console, round_index=1)


async def test_a_server_that_does_not_stream_cannot_be_measured_and_the_error_says_what_to_give(console):
    instead = "no answer token by token.*: give --rate, --slo-ttft-ms and --slo-tpot-ms instead of auto"
    with running(Behaviour(in_one_piece=True)) as url, pytest.raises(ServerError, match=instead):
        await measure_unloaded(url, _plan(slo="auto"), console, round_index=1)


async def test_a_run_that_was_disaggregated_in_name_only_is_refused(tmp_path, console):
    with pytest.raises(NotDisaggregatedError, match=r"only .* of the eligible requests went through both pools"):
        await _Cluster(fallback_every=6).compare(_compare_plan(), tmp_path, console)
    assert not (tmp_path / "summary.json").exists()
    with pytest.raises(NotDisaggregatedError, match="publishes no ridgeline_ metrics"):
        await _Cluster(has_metrics=False).compare(_compare_plan(), tmp_path, console)


async def test_a_replay_tells_the_server_slos_that_were_given_and_no_others(console, monkeypatch):
    monkeypatch.setattr(replay_command_module, "check_client", lambda _: None)  # there is no tokenizer to load
    behaviour = Behaviour(ttft_s=0.01, tpot_s=0.001)
    with running(behaviour) as url:
        await replay_command(url, _plan(), None, console)
        assert set(behaviour.slos) == {None}
        behaviour.slos.clear()
        await replay_command(url, _plan(slo_ttft_ms=750.0), None, console)
        assert set(behaviour.slos) == {"750"}
