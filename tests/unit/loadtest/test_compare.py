"""The search for the maximum goodput rate with its page and table, on rounds of simulated servers."""

import io
import json
import math
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from ridgeline.loadtest import find_rate as module
from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.find_rate import GIVEN_UP_AFTER, bounded_deadline_s, find_rate
from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.preparation import Prepared
from ridgeline.loadtest.report.rates_page import print_rates
from ridgeline.loadtest.report.rounds import Round
from ridgeline.loadtest.run.calibration import Load
from ridgeline.loadtest.run.replay import ReplayResult
from ridgeline.loadtest.saved import FORMER_NAMES, print_side_by_side, report_again
from ridgeline.loadtest.trace.windows import PairTraces
from ridgeline.loadtest.variants import Devices
from tests.support.load_records import a_record
from tests.support.summary_schema import schema_problems

PLAN = ComparePlan(
    trace="poisson:rate=1,input=32,output=8,n=40",
    find_rate=True,
    rate=1.0,
    slo_ttft_ms=400,
    slo_tpot_ms=60,
    price_per_hour=0.04,
)
KNEES = {"a": 1.5, "b": 3.0, "c": 2.0, "d": 2.5}


class _Arm:
    def __init__(self, mode: str, cores: int) -> None:
        self.mode, self.devices = mode, Devices("core", cores, {})


class _Runner:
    """Answers in time the more seldom, the further the rate is above the variant's knee."""

    def __init__(self, variants, prepared, _records_file, console, *, began_s, **_) -> None:
        self.variants = dict(zip("abcd", variants, strict=False))
        self.labels = {side: variant.mode for side, variant in self.variants.items()}
        self.plan, self.console = prepared.plan, console
        self.rounds, self.longest_s, self.began_s = [], 1.0, began_s

    def has_begun(self, _pair):
        return False

    async def pair(self, pair, trace, title):
        found = {}
        for side in reversed(self.variants):
            share = 1 / (1 + math.exp(-(math.log(9) - 12 * math.log(trace.mean_rate / KNEES[side]))))
            late = len(trace.rows) - round(share * len(trace.rows))
            records = tuple(
                a_record(i, 9.0 if i < late else 0.1, input_tokens=32, output_tokens=row.output_tokens)
                for i, row in enumerate(trace.rows)
            )
            found[side] = ReplayResult(trace, records, 1.0, None, ())
            self.rounds.append(Round(side, pair, datetime.now(UTC), found[side], None, (), True))
        return found


def _prepared(plan: ComparePlan, context_tokens: int | None = 4096) -> Prepared:
    traces = PairTraces(plan, context_tokens)
    return Prepared(plan, Load(1.0, "as given", "as given"), traces, 100, 1, True)


@pytest.fixture
def searched(monkeypatch, tmp_path):
    """Return what searches the rates of some variants."""

    async def prepare(_variant, plan, *_):
        return _prepared(plan)

    monkeypatch.setattr(module, "prepare", prepare)
    monkeypatch.setattr(module, "new_runner", _Runner)

    async def search(*variants: _Arm, plan: ComparePlan = PLAN):
        text = StringIO()
        result = await find_rate(variants, plan, tmp_path, Console(file=text, width=200))
        return result, text.getvalue()

    return search


@pytest.fixture
async def found(searched):
    return await searched(_Arm("colocated", 2), _Arm("disaggregated", 2))


async def test_both_knees_their_ratio_and_figures_per_device_are_found_and_written(found, tmp_path):
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert schema_problems(summary) == []
    rates = summary["rates"]
    for side in ("a", "b"):
        max_rate = KNEES[side]
        knee = rates["variants"][side]["max_goodput_rate"]
        assert knee["rate"] == pytest.approx(max_rate, rel=0.1)
        assert knee["low"] < max_rate < knee["high"]
        owned = rates["variants"][side]["per_device"]
        assert owned["rate_per_device"] == pytest.approx(knee["rate"] / 2)
        assert owned["cost_per_million_output_tokens"] == pytest.approx(0.08 / 3600 / (knee["rate"] * 8) * 1e6)
    assert rates["verdict"]["ratios"]["b / a"]["low"] < 2 < rates["verdict"]["ratios"]["b / a"]["high"]
    assert (rates["verdict"]["leader"], rates["verdict"]["evidence"]) == ("b", "strong")
    assert rates["sentences"][0].startswith("Colocated holds 1.")
    assert rates["sentences"][0].endswith("): disaggregated, strong evidence.")
    one = rates["rounds"][0]
    assert (one["rate"], one["total"], one["variant"]) == (1.0, 40, "b")
    assert one["attainment"] == one["met"] / one["total"]


async def test_a_folder_of_an_earlier_version_is_shown(found, tmp_path):
    def shown() -> str:
        console = Console(record=True, file=io.StringIO())
        report_again(tmp_path, console)
        return console.export_text()

    written, now = tmp_path / "summary.json", shown()
    text = written.read_text()
    for former, name in FORMER_NAMES.items():
        text = text.replace(f'"{name}":', f'"{former}":')
    written.write_text(text)
    assert '"arms":' in text
    assert "strong evidence" in now
    assert shown() == now
    written.write_text(text.replace('"verdict":', '"no_verdict":'))
    with pytest.raises(LoadTestError, match=r"a version before 0\.2"):
        shown()
    written.write_bytes(b'{"plan": "\xff"}')
    with pytest.raises(LoadTestError, match=r"summary\.json cannot be read: 'utf-8'"):
        shown()


@pytest.mark.parametrize(
    ("asked", "configured", "says"),
    [
        ("m", {"path": "/models/other"}, "model m · trace"),
        (None, {"path": "/models/other", "served_name": None}, "model /models/other · trace"),
        (None, {"path": "/models/other", "served_name": "name"}, "model name · trace"),
        (None, {"path": "/models/other", "served_name": ["name", "another"]}, "model name · trace"),
    ],
)
async def test_the_page_names_the_model(found, tmp_path, asked, configured, says):
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert "model" not in _setting_of(found[0].report), "it is not known"
    summary["plan"]["served_name"] = asked
    summary["setup"] = {"configuration": {"model": configured}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert says in _setting_of(report_again(tmp_path, Console(file=StringIO())))


def _setting_of(page: Path) -> str:
    return page.read_text().split('<p class="muted">')[1].split("</p>")[0]


async def test_three_variants_have_a_rate_each_and_a_ratio_of_each_two(searched):
    result, terminal = await searched(_Arm("colocated", 2), _Arm("disaggregated", 2), _Arm("vLLM", 4))
    rates, page = result.summary["rates"], result.report.read_text()
    for side, max_rate in list(KNEES.items())[:3]:
        assert rates["variants"][side]["max_goodput_rate"]["rate"] == pytest.approx(max_rate, rel=0.1)
    assert set(rates["verdict"]["ratios"]) == {"b / a", "c / a", "c / b"}
    assert rates["verdict"]["behind"] == {"a": "strong", "c": "strong"}
    for sentence in rates["sentences"]:
        assert sentence in terminal
        assert sentence in page
    assert "The rounds of a pair have the same arrivals and lengths" in page
    assert schema_problems(result.summary) == []


async def test_terminal_and_page_say_the_same_and_the_result_takes_at_most_fifteen_lines(found):
    result, terminal = found
    page = result.report.read_text()
    for sentence in result.summary["rates"]["sentences"]:
        assert sentence in page
        assert sentence in terminal
    assert "Requests within the SLOs against rate" in page
    assert "pair 1 at 1 requests/s" in terminal
    narrow = StringIO()
    print_rates(result.summary, Console(file=narrow, width=100))
    assert len(narrow.getvalue().splitlines()) <= 15


async def test_equal_variants_are_said_to_be_alike_or_not_told_apart(searched, monkeypatch):
    monkeypatch.setitem(KNEES, "b", KNEES["a"])
    result, _ = await searched(_Arm("colocated", 2), _Arm("colocated", 2))
    assert result.summary["rates"]["verdict"]["leader"] in ("a", "b")
    assert "evidence" not in result.summary["rates"]["sentences"][0]


async def test_a_reader_of_the_page_finds_the_figures_at_each_rate(found):
    result, _ = found
    for variant in result.summary["rates"]["variants"].values():
        rates = [point["rate"] for point in variant["points"]]
        assert rates == sorted(set(rates))
        assert sum(point["rounds"] for point in variant["points"]) == len(result.summary["rates"]["rounds"]) / 2
        assert variant["output_tokens_per_s"] == pytest.approx(8 * variant["max_goodput_rate"]["rate"])


async def test_a_search_is_shown_again_alone_and_not_beside_another_run(found, tmp_path):
    console = Console(file=StringIO(), width=200)
    folder = found[0].report.parent
    found[0].report.unlink()
    page = report_again(folder, console).read_text()
    assert all(sentence in page for sentence in found[0].summary["rates"]["sentences"])
    assert "requests/s" in console.file.getvalue()
    with pytest.raises(LoadTestError, match="holds a search for rates"):
        print_side_by_side(folder, tmp_path / "other", console)


async def test_rounds_at_any_rate_take_as_long(found):
    result, _ = found
    for each in result.summary["rates"]["rounds"]:
        assert each["total"] == pytest.approx(39 * each["rate"] + 1, abs=0.6)


async def test_requests_that_the_model_cannot_hold_are_in_no_round_of_a_search(searched, monkeypatch):
    async def prepare(_variant, plan, *_):
        return _prepared(plan, context_tokens=600)

    monkeypatch.setattr(module, "prepare", prepare)
    plan = PLAN.model_copy(update={"trace": "demo", "limit": 40})
    result, _ = await searched(_Arm("colocated", 2), _Arm("disaggregated", 2), plan=plan)
    assert "longer than the model's 600 tokens" in " ".join(result.summary["trace"]["changes"])
    assert min(each["total"] for each in result.summary["rates"]["rounds"]) >= 10


async def test_the_page_has_a_map_of_the_highest_rates_per_device_over_limits(searched):
    result, _ = await searched(_Arm("colocated", 2), _Arm("disaggregated", 2), _Arm("vLLM", 4))
    found, page = result.summary["rates"]["map"], result.report.read_text()
    assert found["unit"] == "requests/s per core"
    own = next(cell for cell in found["cells"] if (cell["ttft_ms"], cell["tpot_ms"]) == (400, 60))
    assert own["winner"] == "b"
    for side, cores in (("a", 2), ("b", 2), ("c", 4)):
        max_rate = result.summary["rates"]["variants"][side]["max_goodput_rate"]["rate"]
        assert own["max_goodput_rates"][side]["rate"] == pytest.approx(max_rate / cores)
    assert "Which variant holds the maximum goodput rate within which SLOs" in page
    assert found["sentence"] in page


def _growing(folder: Path) -> Path:
    """Write an Azure trace of two windows of five requests, of which the second has the longer answers."""
    lines = [f"2023-11-16 18:00:{second:02},100,{10 if second < 5 else 200}" for second in range(10)]
    file = folder / "growing.csv"
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    return file


def test_no_request_of_a_later_window_is_given_up_within_its_limits(tmp_path):
    plan = PLAN.model_copy(update={"trace": str(_growing(tmp_path)), "limit": 5})
    traces = PairTraces(plan)
    longest = [max(row.output_tokens for row in traces.of_pair(pair).rows) for pair in range(traces.windows)]
    assert longest[0] < max(longest)
    assert bounded_deadline_s(_prepared(plan)) == pytest.approx(GIVEN_UP_AFTER * (0.4 + max(longest) * 0.06))


async def test_each_round_is_offered_at_the_rate_in_its_title_however_bursty_the_trace_is(
    searched, monkeypatch, tmp_path
):
    said = []

    class Watched(_Runner):
        async def pair(self, pair, trace, title):
            said.append((title, f"pair {pair + 1}, {trace.mean_rate:.3g} requests/s"))
            return await super().pair(pair, trace, title)

    monkeypatch.setattr(module, "new_runner", Watched)
    times_s = [*range(0, 40, 2), *(40 + step / 10 for step in range(20))]
    lines = [f"2023-11-16 18:00:{at:04.1f},32,8" for at in times_s]
    file = tmp_path / "bursts.csv"
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    await searched(_Arm("colocated", 2), plan=PLAN.model_copy(update={"trace": str(file), "limit": 20}))
    assert len(said) > 2
    assert all(title == offered for title, offered in said)


def test_a_request_is_given_up_when_it_has_taken_twice_what_its_limits_allow():
    assert bounded_deadline_s(_prepared(PLAN)) == pytest.approx(GIVEN_UP_AFTER * (0.4 + 8 * 0.06))
    assert bounded_deadline_s(_prepared(PLAN.model_copy(update={"deadline_s": 0.5}))) == 0.5


@pytest.mark.parametrize("asked", [{"pairs": 6}, {"margin": 0.1}, {"time_scale": 2.0}, {"duration_s": 9.0}])
@pytest.mark.parametrize("is_default", [False, True])
def test_options_that_a_search_chooses_itself_are_refused(asked, is_default):
    if is_default and (default := ComparePlan.model_fields[next(iter(asked))].default) is not None:
        asked = dict.fromkeys(asked, default)
    with pytest.raises(ValueError, match=f"leave out {next(iter(asked))}"):
        ComparePlan(find_rate=True, **asked)


def test_an_attainment_without_a_search_is_refused():
    with pytest.raises(ValueError, match="give find_rate too"):
        ComparePlan(attainment=0.95)


def test_without_a_rate_a_search_measures_its_first_one():
    assert ComparePlan(find_rate=True).of_search().rate == "auto"
    assert PLAN.of_search().rate == 1.0


@pytest.mark.parametrize("knee", [0.01, 1.6, 100.0])
async def test_a_run_of_a_single_pair_tells_what_little_it_knows(searched, monkeypatch, knee):
    monkeypatch.setattr(module, "MOST_PAIRS_OF_A_SEARCH", 1)
    monkeypatch.setitem(KNEES, "a", knee)
    result, terminal = await searched(_Arm("colocated", 2), _Arm("disaggregated", 2))
    assert result.summary["rates"]["sentences"][0] in terminal
    assert len(result.summary["rates"]["rounds"]) == 2
    assert schema_problems(json.loads(json.dumps(result.summary))) == []


async def test_slos_that_no_variant_meets_are_said_to_be_out_of_reach(searched, monkeypatch):
    for side in KNEES:
        monkeypatch.setitem(KNEES, side, 1e-6)
    result, _ = await searched(_Arm("colocated", 2), _Arm("disaggregated", 2))
    assert result.summary["rates"]["sentences"][0].endswith("no rate measured was low enough for these SLOs.")
    assert len(result.summary["rates"]["sentences"]) == 1, "no pause is told of rates that nobody holds"


async def test_variants_that_hold_every_rate_are_not_told_apart(searched, monkeypatch):
    for side in KNEES:
        monkeypatch.setitem(KNEES, side, 1e6)
    result, _ = await searched(_Arm("colocated", 2), _Arm("disaggregated", 2))
    assert "are not told apart, since no rate measured was high enough" in result.summary["rates"]["sentences"][0]


async def test_no_pause_is_told_of_answers_of_one_token(searched):
    plan = PLAN.model_copy(update={"trace": "poisson:rate=1,input=32,output=1,n=40"})
    result, terminal = await searched(_Arm("colocated", 2), _Arm("disaggregated", 2), plan=plan)
    assert len(result.summary["rates"]["sentences"]) == 1
    assert "ongest pause of a stream" not in terminal


async def test_a_name_with_brackets_is_shown_as_it_is(searched):
    _, terminal = await searched(_Arm("colocated", 2), _Arm("vLLM [/tp=2]", 2))
    assert "pair 1 at 1 requests/s: colocated" in terminal
    assert terminal.count("vLLM [/tp=2]") > 2


async def test_a_search_is_finished_only_when_all_its_files_are_written(searched, monkeypatch, tmp_path):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_record_table", killed)
    with pytest.raises(KeyboardInterrupt):
        await searched(_Arm("colocated", 2), _Arm("disaggregated", 2))
    assert not (tmp_path / "summary.json").exists(), "--resume would call it finished"
