"""What `ridgeline whatif` prints of a recording, and what it refuses."""

import io

import msgspec
import pytest
from rich.console import Console

import ridgeline.cluster.commands.loadtest
from ridgeline.cluster.commands.whatif import (
    PlanAsked,
    checked,
    compare_plan,
    plan,
    pools_of,
    require_new,
    whatif,
    with_options,
    write_trace,
)
from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.trace.readers import load_trace
from ridgeline.router.scheduler.offline_simulation import (
    Served,
    calibrated,
    fleet_of,
    outcome,
    part_of,
    recorded,
    simulated,
)
from ridgeline.router.scheduler.recorded_events import AnswerCompleted, Arrived, Began, limit, line_of, read_recording
from tests.support.simulated_serving import ADAPTIVE_STEP_TOKENS, BF16, KNEES, fleet_model, requests_of
from tests.unit.router.scheduler.samples import poisson
from tests.unit.router.scheduler.test_replay import recording_of


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("recordings") / "monday.jsonl"
    path.write_bytes(b"".join(recording_of(poisson(0.5, 30))))
    return path


def printed(file, *policies, workers=()):
    console = Console(file=io.StringIO(), width=200)
    whatif(file, console, policies, workers)
    return console.file.getvalue()


def test_each_asked_policy_is_a_row_beside_what_was_seen(file):
    told = printed(file, "colocated", "threshold:split_above_tokens=256", workers=(2, 3))
    rows = [line.split("│")[1].strip() for line in told.splitlines() if "│" in line][0:]
    assert rows[1:] == ["colocated", "threshold:split_above_tokens=256"] * 2
    assert rows[0].startswith("as served")
    assert "33 of 33 decisions come out the same (30 placements, 3 comparisons of policies)" in told
    assert "all rows but the first are simulated" in told


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("nobody", "there is no policy 'nobody' here: choose adaptive or one of"),
        ("threshold", "'threshold' cannot be made with the options {}"),
        ("threshold:split_above_tokens", "write options as NAME:OPTION=VALUE"),
        ("threshold:above=3", "cannot be made with the options {'above': 3}"),
        ("threshold:split_above_tokens=[", "'[' is no value of split_above_tokens"),
        ("adaptive:part=0.5", "adaptive has no options: leave out part"),
    ],
)
def test_a_policy_that_cannot_be_made_is_refused_in_one_sentence(file, policy, says):
    with pytest.raises(LoadTestError) as refused:
        printed(file, policy)
    assert says in str(refused.value)


def test_a_fixed_mode_with_options_serves_prompts_first_come_as_the_one_without(tmp_path):
    requests = poisson(3.0, 60, ttft_slo_s=60.0, tpot_slo_s=1.0)
    for hurried in requests[1::2]:
        hurried.ttft_slo_s = 5.0  # by deadline it would pass those that wait
    file = tmp_path / "mixed.jsonl"
    file.write_bytes(b"".join(recording_of(requests)))
    told = printed(file, "disaggregated", "disaggregated:prefill_part=0.5")
    plain, with_part = [line.split("│")[2:] for line in told.splitlines() if "│ disaggregated" in line]
    assert plain == with_part


def test_options_are_read_as_in_the_configuration():
    asked = "1 of 2 for prefill, slack"
    assert with_options(asked) == (asked, {})
    assert with_options("mine:tokens=256,part=0.5,loud=true,name=x") == (
        "mine",
        {"tokens": 256, "part": 0.5, "loud": True, "name": "x"},
    )


def recording_in_mode(served_by, requests, *, took=1.0, began=(), **model):
    """Lines of a recording in one mode, whose steps took so many times what their models say."""
    known = fleet_model(2, msgspec.structs.replace(BF16, **model))
    served = [Served(one.arrival_s, one.prompt_tokens, one.output_tokens) for one in requests]
    ended = simulated(served, known, served_by, slower=took)
    events = [Began(0.0, served_by, "colocated", {}, "act", False, 0, 8, [], known)]
    events += [
        Arrived(one.arrival_s, one.number, one.prompt_tokens, limit(one.ttft_slo_s), limit(one.tpot_slo_s))
        for one in requests
    ]
    events += [AnswerCompleted(one.end_s, one.number, one.output_tokens, one.ttft_s, one.tpot_s) for one in ended]
    events[0] = msgspec.structs.replace(events[0], **dict(began))
    return b"".join(map(line_of, events))


def planned(file, **options):
    console = Console(file=io.StringIO(), width=200)
    plan(PlanAsked(**{"file": file, "goal": 0.9, "most": 8, **options}), console)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    path = tmp_path_factory.mktemp("recordings") / "busy.jsonl"
    path.write_bytes(recording_in_mode("colocated", poisson(2.0, 60, ttft_slo_s=3.0, tpot_slo_s=0.08)))
    return path


def rows_of(told):
    """Of a table: policy, workers, in time, range, ..."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in told.splitlines() if "│" in line]


def test_a_plan_names_the_fewest_workers_and_the_best_two_modes_are_compared_with_as_many(busy, tmp_path):
    console = Console(file=io.StringIO(), width=200)
    modes, served = plan(PlanAsked(file=busy, goal=0.9, most=8), console)
    told = console.file.getvalue()
    best, *others = rows_of(told)
    workers, least = int(best[1]), float(best[3].partition("%")[0])
    assert f"{workers} workers would keep 90%" in told
    assert workers > 1
    assert least >= 90
    fewer = [float(row[3].partition("%")[0]) for row in others if int(row[1]) == workers - 1]
    assert fewer
    assert max(fewer) < 90
    comparison = compare_plan(modes, served, tmp_path)
    require_new(tmp_path)
    write_trace(served, tmp_path)
    assert comparison.modes == tuple(one.policy.partition(" ")[0] for one in modes[:2])
    assert [(row.input_tokens, row.output_tokens) for row in load_trace(comparison.trace).rows] == [(512, 64)] * 60
    numbers = dict(setting.rsplit("=", 1) for setting in pools_of(modes))
    assert int(numbers["pools.prefill.workers"]) + int(numbers["pools.decode.workers"]) == workers
    assert int(numbers["pools.colocated.workers"]) == workers


@pytest.mark.parametrize(
    ("began", "is_simulated"),
    [
        ({}, True),
        ({"mode": "adaptive", "policy": "colocated", "always": True}, True),
        ({"mode": "adaptive", "policy": "threshold", "always": True}, False),
    ],
)
def test_a_plan_says_its_error_on_what_was_recorded_if_the_policy_can_be_made_by_name(tmp_path, began, is_simulated):
    file = tmp_path / "one.jsonl"
    requests = poisson(1.0, 60, ttft_slo_s=3.0, tpot_slo_s=0.08)
    file.write_bytes(recording_in_mode("colocated", requests, began=began))
    assert ("Steps take" in planned(file)) == is_simulated


def test_more_requests_take_more_workers_and_a_number_that_is_not_enough_is_said(busy):
    assert "2 workers would not keep 90%, and more were not tried (--most)" in planned(busy, growth=8.0, most=2)


def test_a_trace_is_planned_for_on_recorded_workers_or_on_a_data_sheet(busy):
    trace = {"trace": "poisson:rate=2,input=512,output=64,n=60", "ttft_slo_s": 3.0, "tpot_slo_s": 0.08}
    assert "workers would keep 90%" in planned(busy, **trace)
    told = planned(None, **trace, model="llama-3.1-8b", hardware="h100-sxm", most=2)
    assert "1 device would keep 90%" in told
    assert "Nothing of this is measured" in told
    assert {row[0].partition(", ")[2] for row in rows_of(told)} >= {
        "TP 1, steps of 2048",
        "TP 2, steps of 8192",
    }


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({}, "there is no traffic to plan for: give a recording, or --trace"),
        ({"trace": "demo"}, "give a recording, or --model and --hardware"),
        ({"trace": "demo", "hardware": "h100-sxm"}, "give --model and --hardware"),
        ({"trace": "demo", "hardware": "h9", "model": "llama-3.1-8b"}, "unknown hardware 'h9'"),
        (
            {"trace": "demo", "hardware": "l4", "model": "llama-3.1-70b", "most": 2},
            "2 l4 have no room for llama-3.1-70b",
        ),
        ({"trace": "agentic:n=60"}, "give a trace without sessions"),
        ({"trace": "missing.jsonl"}, "missing.jsonl"),
    ],
)
def test_a_plan_without_what_it_takes_says_what_to_give(asked, says):
    with pytest.raises(LoadTestError) as refused:
        planned(None, **{"ttft_slo_s": 3.0, **asked})
    assert says in str(refused.value)


def test_steps_that_took_longer_than_modelled_are_simulated_so():
    lines = recording_in_mode("disaggregated", poisson(1.0, 60, ttft_slo_s=3.0, tpot_slo_s=0.08), took=4 / 3)
    found = calibrated(recorded(read_recording(lines.splitlines(keepends=True), "a.jsonl")))
    assert found.slowdown == pytest.approx(4 / 3, rel=0.05)
    assert found.simulated.tpot_s == pytest.approx(found.seen.tpot_s, rel=0.05)


def test_more_workers_are_no_worse_though_batches_of_some_sizes_were_slow_when_models_were_fitted():
    requests = poisson(4.0, 80, ttft_slo_s=3.0, tpot_slo_s=0.09)
    slow = {"corrections": (1.0, 1.23, 1.49, 1.19, 0.45), "most_decode_tokens": 8}
    lines = recording_in_mode("colocated", requests, **slow).splitlines(keepends=True)
    known = recorded(read_recording(lines, "a.jsonl"))
    served = [simulated(known.requests, fleet_of(known.fleet, number), "colocated") for number in (2, 4, 8, 16, 32)]
    parts = [part_of([one.in_time for one in each]) for each in served]
    assert parts == sorted(parts)
    assert parts[-1] == 1.0


def test_mode_adaptive_begins_as_on_a_server_that_has_served_such_requests_before():
    rate = 1.3 * KNEES[2]["512/64"]["balanced"]
    served = [
        Served(one.arrival_s, one.prompt_tokens, one.output_tokens, one.ttft_slo_s, one.tpot_slo_s)
        for one in requests_of("512/64", "balanced", rate, 28, 1)
    ]
    made = simulated(served, fleet_model(step_tokens=ADAPTIVE_STEP_TOKENS), "adaptive")
    assert max(one.tpot_s for one in made[:8]) < 1.5 * max(one.tpot_s for one in made[8:]), "colocated"


@pytest.mark.parametrize(
    ("recorded_so", "says"),
    [
        ({"most_decode_tokens": 1}, "tokens a step, and step models were fitted to 1 at most"),
        ({"took": 8.0}, "what was recorded comes out"),
    ],
)
def test_a_plan_does_not_know_what_is_far_beyond_its_step_models(tmp_path, recorded_so, says):
    file = tmp_path / "few.jsonl"
    requests = poisson(0.5, 60, ttft_slo_s=9.0, tpot_slo_s=0.9)
    file.write_bytes(recording_in_mode("colocated", requests, **recorded_so))
    told = planned(file, most=2)
    assert "I do not know" in told
    assert says in told


async def test_the_regret_is_what_the_better_mode_had_more_on_engines(monkeypatch, tmp_path):
    async def compared(config, comparison, out, console):
        goodput = dict(zip(comparison.modes, (0.6, 0.8), strict=True))
        return {"variants": {mode: {"mode": mode, "points": [{"request_goodput": goodput[mode]}]} for mode in goodput}}

    monkeypatch.setattr(ridgeline.cluster.commands.loadtest, "compare_command", compared)
    console = Console(file=io.StringIO(), width=200)
    await checked(RidgelineConfig(), ComparePlan(variants="disaggregated,adaptive"), tmp_path, console)
    assert "regret of the plan: 25.0% of the goodput" in console.file.getvalue()


def test_a_check_has_a_folder_of_its_own(tmp_path):
    write_trace([Served(0.0, 512, 64)], tmp_path / "earlier")
    require_new(tmp_path / "earlier")  # nothing has run yet
    (tmp_path / "earlier" / "run.json").touch()
    (tmp_path / "file").touch()
    for name in ("earlier", "file"):
        with pytest.raises(LoadTestError, match="name a new folder"):
            require_new(tmp_path / name)


def test_a_plan_whose_simulation_has_others_in_time_than_were_does_not_know(tmp_path):
    late = tmp_path / "late.jsonl"
    lines = recording_in_mode("colocated", poisson(0.5, 60, ttft_slo_s=3.0, tpot_slo_s=0.5)).splitlines(keepends=True)
    late.write_bytes(b"".join(line_of(_late(one)) for one in read_recording(lines, "a.jsonl")))
    told = planned(late)
    assert "I do not know" in told, told
    assert "of what was recorded" in told


def _late(event):
    is_late = isinstance(event, AnswerCompleted) and event.number % 3 == 0
    return msgspec.structs.replace(event, ttft_s=event.ttft_s + 5.0) if is_late else event


def test_requests_without_an_slo_say_nothing_of_whether_the_goal_is_kept():
    kept, missed = Served(0.0, 8, 8, 1.0, 1.0, 0.5, 0.1), Served(0.0, 8, 8, 0.1, 1.0, 0.5, 0.1)
    assert outcome("a", 1, [kept, missed, *[Served(0.0, 8, 8, ttft_s=9.0)] * 8]).in_time == 0.5


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"ttft_slo_s": 0.001, "tpot_slo_s": 0.001}, "no number of workers helps"),
        ({"trace": "poisson:rate=1,input=9000000,output=16,n=50", "tpot_slo_s": 0.08}, "more than the KV cache"),
    ],
)
def test_requests_that_no_number_of_workers_serves_in_time_are_named_at_once(tmp_path, asked, says):
    file = tmp_path / "small.jsonl"
    lines = recording_in_mode("colocated", poisson(2.0, 60, ttft_slo_s=3.0, tpot_slo_s=0.08)).splitlines(keepends=True)
    began, *others = read_recording(lines, "a.jsonl")
    specs = tuple(msgspec.structs.replace(one, kv_tokens=40_000) for one in began.fleet.workers)
    fleet = msgspec.structs.replace(began.fleet, workers=specs)
    file.write_bytes(b"".join(map(line_of, [msgspec.structs.replace(began, fleet=fleet), *others])))
    with pytest.raises(LoadTestError, match=says):
        planned(file, **asked)


@pytest.mark.parametrize(
    ("slos", "workers", "says"),
    [
        ([(3.0, 0.08), (2.0, 0.08)], 2, "one SLO on TTFT and one on TPOT"),
        ([(3.0, float("inf"))] * 2, 2, "one SLO on TTFT and one on TPOT"),
        ([(3.0, 0.08)] * 2, 1, "one worker serves in mode colocated alone"),
        ([(3.0, 0.08)], 2, "all requests come at once"),
    ],
)
def test_what_cannot_be_checked_is_refused(tmp_path, slos, workers, says):
    served = [Served(number, 512, 64, *each) for number, each in enumerate(slos)]
    with pytest.raises(LoadTestError, match=says):
        compare_plan([outcome(mode, workers, served) for mode in ("colocated", "adaptive")], served, tmp_path)


@pytest.mark.parametrize(
    ("number", "slos", "says"),
    [
        (30, {"ttft_slo_s": 3.0}, "has 30 answers, and a plan takes 50 or more: record for longer"),
        (60, {}, "no request has an SLO"),
    ],
)
def test_a_plan_without_a_goal_or_with_too_few_requests_is_refused(tmp_path, number, slos, says):
    file = tmp_path / "few.jsonl"
    file.write_bytes(recording_in_mode("colocated", poisson(0.5, number, **slos)))
    with pytest.raises(LoadTestError) as refused:
        planned(file)
    assert says in str(refused.value)
