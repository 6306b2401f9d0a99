"""What `ridgeline whatif` prints of a recording, and what it refuses."""

import io

import msgspec
import pytest
from rich.console import Console

from ridgeline.cluster.commands.whatif import plan, whatif, with_options
from ridgeline.loadtest.errors import LoadTestError
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


def planned(file, **options):
    console = Console(file=io.StringIO(), width=200)
    plan(file, console, **{"goal": 0.9, "growth": 1.0, "most": 8, **options})
    return console.file.getvalue()


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    path = tmp_path_factory.mktemp("recordings") / "busy.jsonl"
    path.write_bytes(b"".join(recording_of(poisson(2.0, 60, ttft_slo_s=3.0, tpot_slo_s=0.08))))
    return path


def test_a_plan_names_the_fewest_workers_and_those_that_are_too_few(busy):
    told = planned(busy)
    rows = {int(line.split("│")[1]): line.split("│")[2:5] for line in told.splitlines() if "│" in line}
    best = int(told.partition(" workers keep 90%")[0].rpartition("\n")[2])
    assert best > 1
    assert float(rows[best][2].strip().rstrip("%")) >= 90
    assert float(rows[best - 1][2].strip().rstrip("%")) < 90


@pytest.mark.parametrize(("policy", "is_simulated"), [("colocated", True), ("threshold", False)])
def test_a_plan_says_its_error_on_what_was_recorded_if_the_policy_can_be_made_by_name(tmp_path, policy, is_simulated):
    file = tmp_path / "one.jsonl"
    lines = recording_of(poisson(2.0, 60, ttft_slo_s=3.0, tpot_slo_s=0.08))
    events = [msgspec.json.decode(line) for line in lines]
    for event in events:
        event |= {"policy": policy} if "policy" in event else {}
    file.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    assert ("The simulation of what was recorded" in planned(file)) == is_simulated


def test_more_requests_take_more_workers_and_a_number_that_is_not_enough_is_said(busy):
    assert "2 workers do not keep 90%, and more were not tried (--most)" in planned(busy, growth=8.0, most=2)


@pytest.mark.parametrize(
    ("number", "slos", "says"),
    [
        (30, {"ttft_slo_s": 3.0}, "has 30 answers, and a plan takes 50 or more: record for longer"),
        (60, {}, "no request has an SLO"),
    ],
)
def test_a_plan_without_a_goal_or_with_too_few_requests_is_refused(tmp_path, number, slos, says):
    file = tmp_path / "few.jsonl"
    file.write_bytes(b"".join(recording_of(poisson(0.5, number, **slos))))
    with pytest.raises(LoadTestError) as refused:
        planned(file)
    assert says in str(refused.value)
