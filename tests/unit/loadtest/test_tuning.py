"""A comparison with candidates: what runs before the pairs, what is chosen, and what no pair may use again."""

import json
from io import StringIO

import polars
import pytest
from rich.console import Console

from ridgeline.loadtest import compare as compare_module
from ridgeline.loadtest import valid_rounds
from ridgeline.loadtest.compare import compare, resume
from ridgeline.loadtest.errors import LoadTestError, ServerError
from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.preparation import Prepared
from ridgeline.loadtest.run.calibration import Load
from ridgeline.loadtest.run.replay import ReplayResult
from ridgeline.loadtest.run.server_metrics import MetricsDelta
from ridgeline.loadtest.run_folder import RunFolder
from ridgeline.loadtest.saved import report_again
from ridgeline.loadtest.trace.windows import PairTraces
from ridgeline.loadtest.tuning import Candidate, Score, best_of, order_of
from ridgeline.loadtest.variants import Reached
from tests.support.load_records import a_record
from tests.support.summary_schema import schema_problems

PLAN = ComparePlan(trace="demo", limit=20, grid="grid.yaml", tuning_rounds=2, pairs=2, slo_ttft_ms=400, slo_tpot_ms=60)
TTFT_S = {"slow": 0.9, "fast": 0.1, "as fast": 0.1, "split": 0.2}
"""The time to the first token of each server; the limit is 0.4 s."""


class _Arm:
    """One that is warm except in its first round."""

    start_s, devices = 0.0, None

    def __init__(self, mode: str, server: str) -> None:
        self.mode, self.server = mode, server

    async def ready(self) -> Reached:
        return Reached(self.server, is_fresh=False)


def _candidate(server: str) -> Candidate:
    mode = "disaggregated" if server == "split" else "colocated"
    return Candidate(server, _Arm(mode, server), {"router": {"max_prompt_wait_s": TTFT_S[server]}})


class _Servers:
    """Stands in for replays and warm-ups, and notes each."""

    def __init__(self) -> None:
        self.replayed: list[tuple[str, tuple, int]] = []
        self.warmed: list[str] = []
        self.breaks_after: int | None = None

    async def replay(self, server, plan, _console, *, label, round_index, requests, record_file):
        if self.breaks_after is not None and len(self.replayed) >= self.breaks_after:
            raise ServerError("gone")
        (name,), rows = server.urls, requests.trace.rows
        self.replayed.append((name, rows, round_index))
        records = tuple(a_record(index, TTFT_S[name], input_tokens=32, output_tokens=8) for index in range(len(rows)))
        for record in records:
            record_file.add(record)
        return ReplayResult(requests.trace, records, 20.0, MetricsDelta({}, {}, 20.0), ())

    async def warm_up(self, server, *_):
        self.warmed.extend(server.urls)

    async def whole(self, _server):
        return None


@pytest.fixture
def servers(monkeypatch):
    async def prepare(_variant, plan, *_):
        return Prepared(plan, Load(1.0, "as given", "as given"), PairTraces(plan), 100, 5, True)

    found = _Servers()
    monkeypatch.setattr(compare_module, "prepare", prepare)
    monkeypatch.setattr(valid_rounds, "run_replay", found.replay)
    monkeypatch.setattr(valid_rounds, "warm_up_workers", found.warm_up)
    monkeypatch.setattr(valid_rounds, "until_whole", found.whole)
    monkeypatch.setattr(valid_rounds, "require_disaggregated", lambda _: None)
    return found


@pytest.fixture
def console():
    return Console(file=StringIO(), width=200)


CANDIDATES = {"a": [_candidate("slow"), _candidate("fast"), _candidate("as fast")], "b": [_candidate("split")]}


async def _compared(folder, console, plan=PLAN):
    return await compare(CANDIDATES, plan, folder, console, is_alone=False)


async def test_every_candidate_runs_all_its_rounds_in_one_go_and_only_the_chosen_are_compared(
    tmp_path, servers, console
):
    await _compared(tmp_path, console)
    tuned, judged = servers.replayed[:8], servers.replayed[8:]
    turns = [server for server, *_ in tuned[::2]]
    assert [server for server, *_ in tuned[1::2]] == turns
    assert sorted(turns) == ["as fast", "fast", "slow", "split"]
    assert sorted(server for server, *_ in judged) == ["fast", "fast", "split", "split"]
    assert servers.warmed[:4] == turns, "each was warmed up once"


async def test_all_candidates_have_the_same_windows_and_no_pair_has_one_of_them_or_a_prompt(tmp_path, servers, console):
    await _compared(tmp_path, console)
    tuned, judged = servers.replayed[:8], servers.replayed[8:]
    windows = [rows for _, rows, _ in tuned]
    assert windows == windows[:2] * 4
    assert windows[0] != windows[1]
    assert not {rows for _, rows, _ in judged} & set(windows)
    indices = [index for *_, index in servers.replayed]
    assert indices == sorted(set(indices))
    assert indices[0] > 5, "the first one is of the warm-up"


async def test_the_summary_has_every_tuning_round_and_the_choice_apart_from_what_is_judged(tmp_path, servers, console):
    result = await _compared(tmp_path, console)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert schema_problems(summary) == []
    tuning = summary["tuning"]
    assert [(each["candidate"], each["attainment"], each["chosen"]) for each in tuning["candidates"]] == [
        ("slow", 0.0, False),
        ("fast", 1.0, True),
        ("as fast", 1.0, False),
        ("split", 1.0, True),
    ]
    assert tuning["candidates"][1]["overrides"] == {"router": {"max_prompt_wait_s": 0.1}}
    assert [each["round"] for each in tuning["rounds"]] == list(range(8))
    assert all(each["valid"] and each["completed"] == 20 for each in tuning["rounds"])
    assert len(summary["rounds"]) == 4
    assert summary["variants"]["a"]["completed"] == 2 * 20
    assert len((tmp_path / "tuning.jsonl").read_text().splitlines()) == 8 * 20
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 4 * 20
    assert polars.read_parquet(tmp_path / "records.parquet")["valid"].to_list() == [True] * 4 * 20
    text, page = console.file.getvalue(), result.report.read_text()
    assert "chosen by tuning for colocated: fast (100% within the SLOs; slow 0%, as fast 100%" in text
    assert "the first declared of equals" in text
    assert "not sure" not in text
    for shown in (text, page):
        assert "Chosen by tuning" in shown
        assert "as fast" in shown
    result.report.unlink()
    again = Console(file=StringIO(), width=200)
    assert "Chosen by tuning" in report_again(tmp_path, again).read_text()


async def test_a_choice_from_disturbed_rounds_is_said_to_be_unsure(tmp_path, servers, console, monkeypatch):
    seen = []

    def reasons(result, *_):
        seen.append(result)
        return ("other work took 39% of this machine's CPU time",) if len(seen) <= 3 else ()

    monkeypatch.setattr(valid_rounds, "discard_reasons", reasons)
    result = await _compared(tmp_path, console)
    tuning = result.summary["tuning"]
    first = tuning["order"][0]["candidate"]
    counts = {each["candidate"]: each["disturbed_rounds"] for each in tuning["candidates"]}
    assert counts == dict.fromkeys(counts, 0) | {first: 1}, "two repeats, and the third is kept"
    for shown in (" ".join(console.file.getvalue().split()), result.report.read_text().lower()):
        assert "the choice is not sure" in shown


async def test_without_candidates_no_table_says_that_something_was_chosen(tmp_path, servers, console):
    variants = CANDIDATES["a"][1].variant, CANDIDATES["b"][0].variant
    result = await compare(variants, PLAN.model_copy(update={"grid": None}), tmp_path, console, is_alone=False)
    assert "tuning" not in result.summary
    assert "Chosen by tuning" not in console.file.getvalue() + result.report.read_text()
    assert not (tmp_path / "tuning.jsonl").exists()


async def test_what_was_interrupted_while_tuning_cannot_go_on_and_nothing_replaces_it(tmp_path, servers, console):
    servers.breaks_after = 3
    with pytest.raises(ServerError):
        await _compared(tmp_path / "run", console)
    with pytest.raises(LoadTestError, match="interrupted while candidates were tuned, which cannot go on: begin anew"):
        RunFolder(tmp_path / "run").past()
    servers.breaks_after = None
    result = await _compared(tmp_path / "run", console)
    assert result.report.parent == tmp_path / "run-2"


async def test_what_was_interrupted_later_goes_on_with_the_choice_and_with_prompts_that_tuning_has_not_used(
    tmp_path, servers, console
):
    servers.breaks_after = 8 + 1
    with pytest.raises(ServerError):
        await _compared(tmp_path, console)
    servers.breaks_after = None
    variants = CANDIDATES["a"][1].variant, CANDIDATES["b"][0].variant
    result = await resume(variants, RunFolder(tmp_path).past(), console, is_alone=False)
    assert [each["candidate"] for each in result.summary["tuning"]["candidates"] if each["chosen"]] == ["fast", "split"]
    indices = [index for *_, index in servers.replayed]
    assert indices == sorted(set(indices))
    assert len(result.summary["rounds"]) == 4


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([("first", 0.8, 2.0), ("second", 0.9, 1.0)], "second"),
        ([("first", 0.9, 1.0), ("second", 0.9, 1.1)], "second"),
        ([("first", 0.9, 1.0), ("second", 0.9, 1.0)], "first"),
        ([("first", 0.1, 1.0), ("second", 0.9, 1.0), ("third", 0.9, 1.0)], "second"),
    ],
)
def test_attainment_decides_then_goodput_then_the_order_of_the_file(scores, best):
    assert best_of([Score(*each) for each in scores]).candidate == best


def test_the_order_has_each_candidate_once_is_drawn_from_the_seed_and_mixes_the_variants():
    candidates = {"a": ["one", "two", "three"], "b": ["one", "two", "three"]}
    orders = [order_of(candidates, seed) for seed in range(20)]
    assert orders[3] == order_of(candidates, 3)
    assert all(sorted(order) == [(side, place) for side in "ab" for place in range(3)] for order in orders)
    firsts = {order[0] for order in orders}
    assert {side for side, _ in firsts} == {"a", "b"}
    assert len(firsts) > 3
