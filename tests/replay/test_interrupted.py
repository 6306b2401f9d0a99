"""A comparison that is stopped in the middle, goes on later, and is shown again from its folder."""

import asyncio
import io
import json
import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from ridgeline.loadtest.compare import compare, resume
from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.run_folder import RunFolder
from ridgeline.loadtest.saved import report_again
from tests.support.openai_server import Behaviour, Ready, running
from tests.support.patience import eventually

REQUESTS, WARM_UP = 6, 4
PLAN = {
    "trace": "poisson:rate=50,input=40,output=6,n=6,seed=1",
    "variants": "colocated,colocated",
    "rate": 50,
    "settle_s": 0.02,
    "tokenizer": "unused",
    "slo_ttft_ms": 200_000,  # no round is discarded, and repeated, because of a late client: it may be late by 4 s
    "slo_tpot_ms": 40,
    "pairs": 2,
}
SETUP = {"configuration": {"model": {"dtype": "float32"}}, "versions": {"vllm": "0.32.0"}}


pytestmark = pytest.mark.usefixtures("plain_tokens")


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200, record=True)


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def _ended(folder: Path) -> int:
    """How many valid rounds a folder has."""
    file = folder / "rounds.jsonl"
    return sum(line["type"] == "ended" and line["is_kept"] for line in _lines(file)) if file.exists() else 0


async def _stopped_in_round_three(behaviour: Behaviour, url: str, folder: Path, console: Console, **fields) -> None:
    """Cancel a comparison, as Ctrl-C does, while requests of its third round run, which cannot end before that."""
    third = 2 * (REQUESTS + WARM_UP)
    behaviour.faults = dict.fromkeys(range(third + 2, third + REQUESTS), "hang")
    plan = ComparePlan(**PLAN | fields)
    run = compare((Ready(url), Ready(url)), plan, RunFolder(folder, SETUP), console, is_alone=False)
    task = asyncio.create_task(run)
    await asyncio.to_thread(behaviour.wait_for_requests, third + 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    behaviour.faults = {}


async def test_a_comparison_that_was_stopped_goes_on_after_its_valid_rounds_and_uses_no_prompt_twice(tmp_path, console):
    behaviour = Behaviour(ttft_s=0.05, tpot_s=0.005, mode="colocated")
    folder = tmp_path / "run"
    with running(behaviour) as url:
        await _stopped_in_round_three(behaviour, url, folder, console)
        assert f"to go on: ridgeline compare --resume {folder}" in console.export_text()
        assert not (folder / "summary.json").exists()
        before = _lines(folder / "rounds.jsonl")
        assert [(line["type"], line["number"]) for line in before] == [("ended", 0), ("ended", 1)]
        past = RunFolder(folder).past()
        await resume((Ready(url), Ready(url)), past, console, is_alone=False)
    summary = _summary(folder)
    assert [each["round"] for each in summary["rounds"]] == [0, 1, 3, 4], "round 2 was cut, and is run again"
    assert [each["completed"] for each in summary["rounds"]] == [REQUESTS] * 4
    assert summary["rounds"][0]["began"] == before[0]["began"][:19] + "+00:00"
    assert all({"client", "pools", "stage_seconds", "machine"} <= set(each) for each in summary["rounds"])
    assert summary["setup"] == SETUP
    (interruption,) = summary["interruptions"]
    assert interruption["stopped"] <= interruption["resumed"]
    assert 0 <= interruption["seconds"] < 600
    prompts = [tuple(prompt) for prompt in behaviour.prompts]
    assert len(set(prompts)) == len(prompts)
    assert len({prompt[:16] for prompt in prompts}) == len(prompts)
    arrivals: dict[tuple[str, int], list[float]] = {}
    for record in _lines(folder / "records.jsonl"):
        if record["round"] != 2:
            arrivals.setdefault((record["variant"], record["pair"]), []).append(record["scheduled_s"])
    assert all(sorted(arrivals["a", pair]) == sorted(arrivals["b", pair]) for pair in range(2))
    assert sorted(arrivals["a", 0]) != sorted(arrivals["a", 1])


async def test_rates_come_in_turn_also_after_an_interruption(tmp_path, console):
    behaviour = Behaviour(ttft_s=0.05, tpot_s=0.005, mode="colocated")
    with running(behaviour) as url:
        await _stopped_in_round_three(behaviour, url, tmp_path, console, rate="20,40", pairs=3, slo_tpot_ms=200_000)
        past = RunFolder(tmp_path).past()
        assert (past.settled.given["rates"], past.settled.settled_plan().rates) == ([20, 40], (20, 40))
        result = await resume((Ready(url), Ready(url)), past, console, is_alone=False)
    rounds = result.summary["rounds"]
    assert [each["round"] for each in rounds] == [0, 1, 3, 4, 5, 6], "round 2 was cut, and is run again"
    assert [each["rate"] for each in rounds] == [20, 20, 40, 40, 20, 20]
    assert [each["total"] for each in rounds] == [6, 6, 11, 11, 6, 6], "all rounds take as long"
    assert {point["rate"]: point["rounds"] for point in result.summary["variants"]["a"]["points"]} == {20: 2, 40: 1}
    assert result.summary["variants"]["a"]["max_goodput_rate"]["outcome"] == "above"


async def test_what_was_measured_is_not_measured_again_when_a_comparison_goes_on(tmp_path, console):
    behaviour = Behaviour(ttft_s=0.05, tpot_s=0.005, mode="colocated")
    with running(behaviour) as url:
        plan = ComparePlan(**PLAN | {"rate": "auto"})
        task = asyncio.create_task(compare((Ready(url), Ready(url)), plan, tmp_path, console, is_alone=False))
        await eventually(lambda: _ended(tmp_path))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        past = RunFolder(tmp_path).past()
        assert past.settled.given["rate"] == "auto"
        sent = len(behaviour.bodies)
        await resume((Ready(url), Ready(url)), past, console, is_alone=False)
    requests = sum(each["total"] for each in _summary(tmp_path)["rounds"] if each["round"] > 0)
    assert len(behaviour.bodies) - sent == requests + 2 * WARM_UP
    assert _summary(tmp_path)["load"]["unloaded"]["median_ttft_s"] == past.settled.load.unloaded.median_ttft_s
    prompts = [tuple(prompt) for prompt in behaviour.prompts]
    assert len(set(prompts)) == len(prompts)


async def test_pairs_from_before_an_interruption_count_although_no_time_is_left_for_another(tmp_path, console):
    behaviour = Behaviour(ttft_s=0.05, tpot_s=0.005, mode="colocated")
    with running(behaviour) as url:
        plan = ComparePlan(**PLAN | {"pairs": 9}, budget_s=600)
        task = asyncio.create_task(compare((Ready(url), Ready(url)), plan, tmp_path, console, is_alone=False))
        await eventually(lambda: _ended(tmp_path) == 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        past = msgspec.structs.replace(RunFolder(tmp_path).past(), spent_s=600.0)
        await resume((Ready(url), Ready(url)), past, console, is_alone=False)
    assert [(each["pair"], each["valid"]) for each in _summary(tmp_path)["rounds"]] == [
        (pair, True) for pair in range(3) for _ in range(2)
    ]


async def test_lines_that_were_half_written_or_damaged_are_left_out(tmp_path, console):
    behaviour = Behaviour(ttft_s=0.05, tpot_s=0.005, mode="colocated")
    with running(behaviour) as url:
        await _stopped_in_round_three(behaviour, url, tmp_path, console)
        for name in ("rounds.jsonl", "records.jsonl"):
            with (tmp_path / name).open("ab") as lines:
                lines.write(b'{"type": "\xff"}\n{"type": "en')
        await resume((Ready(url), Ready(url)), RunFolder(tmp_path).past(), console, is_alone=False)
    assert [each["valid"] for each in _summary(tmp_path)["rounds"]] == [True] * 4
    assert report_again(tmp_path, console).exists()


def test_a_folder_without_an_interrupted_comparison_is_named(tmp_path):
    with pytest.raises(LoadTestError, match="holds no comparison that could go on"):
        RunFolder(tmp_path / "nothing").past()
    for content in (b"{}", b'{"given": "\xff"}'):
        (tmp_path / "run.json").write_bytes(content)
        with pytest.raises(LoadTestError, match=r"run\.json is not of this version"):
            RunFolder(tmp_path).past()
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(LoadTestError, match="is finished: ridgeline report"):
        RunFolder(tmp_path).past()


async def test_a_second_run_leaves_the_first_alone_which_is_shown_again(tmp_path, console):
    folder = tmp_path / "run"
    with running(Behaviour(ttft_s=0.01, tpot_s=0.001, mode="colocated")) as url:
        variants = Ready(url), Ready(url)
        first = await compare(variants, ComparePlan(**PLAN | {"pairs": 1}), folder, console, is_alone=False)
        kept = {path.name: path.read_bytes() for path in folder.iterdir()}
        second = await compare(variants, ComparePlan(**PLAN | {"pairs": 1, "seed": 7}), folder, console, is_alone=False)
    assert first.report.parent == folder
    assert second.report.parent == tmp_path / "run-2"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == kept
    assert "holds a run, which is kept" in console.export_text(clear=False)

    first.report.unlink()
    report_again(folder, console)
    ids = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
    assert ids.sub("", first.report.read_text()) == ids.sub("", kept["report.html"].decode())


def test_a_folder_of_which_no_page_can_be_made_is_named(tmp_path, console):
    with pytest.raises(LoadTestError, match="holds no run"):
        report_again(tmp_path, console)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(LoadTestError, match="was interrupted: ridgeline compare --resume"):
        report_again(tmp_path, console)
    for content, told in (
        ('{"completed": 3}', "holds a replay and not a comparison"),
        ('{"variants": {}, "schema": "urn:ridgeline:summary:2"}', "was written by another version"),
        ("{", "cannot be read"),
    ):
        (tmp_path / "summary.json").write_text(content)
        with pytest.raises(LoadTestError, match=told):
            report_again(tmp_path, console)
