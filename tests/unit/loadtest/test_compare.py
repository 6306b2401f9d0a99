"""A comparison over rates with its page and tables, on rounds of simulated servers."""

import json
import math
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from ridgeline.loadtest import compare as module
from ridgeline.loadtest.compare import compare
from ridgeline.loadtest.errors import UnequalError
from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.preparation import GIVEN_UP_AFTER, bounded_deadline_s
from ridgeline.loadtest.report.page import print_comparison
from ridgeline.loadtest.report.rounds import Round
from ridgeline.loadtest.run.calibration import Load
from ridgeline.loadtest.run.replay import ReplayResult
from ridgeline.loadtest.run.server_facts import ServerFacts
from ridgeline.loadtest.run_folder import Settled
from ridgeline.loadtest.saved import report_again
from ridgeline.loadtest.trace.windows import PairTraces
from ridgeline.loadtest.variants import Devices
from tests.support.load_records import a_record
from tests.support.summary_schema import schema_problems

PLAN = ComparePlan(
    trace="poisson:rate=1,input=32,output=8,n=40",
    pairs=12,
    slo_ttft_ms=400,
    slo_tpot_ms=60,
    price_per_hour=0.04,
)
QUIET = Console(quiet=True)
MAX_RATES = {"a": 1.5, "b": 3.0, "c": 2.0, "d": 2.5}


class _Variant:
    context_tokens, start_s = None, 0.0

    def __init__(self, mode: str, cores: int = 2, **facts: str) -> None:
        self.mode, self.devices, self.facts = mode, Devices("core", cores, {}), ServerFacts(**facts)


class _Runner:
    """Answers in time the more seldom, the further the rate is above the variant's highest one."""

    reasons: tuple[str, ...] = ()

    def __init__(self, variants, past, console, *, began_s, **_) -> None:
        self.variants = dict(zip("abcd", variants, strict=False))
        self.labels = {side: variant.mode for side, variant in self.variants.items()}
        self.plan, self.console = past.settled.settled_plan(), console
        self.rounds, self.longest_s, self.began_s = [], 1.0, began_s

    def has_begun(self, _pair):
        return False

    async def pair(self, pair, trace, title):
        found = {}
        for side in reversed(self.variants):
            share = 1 / (1 + math.exp(-(math.log(9) - 12 * math.log(trace.mean_rate / MAX_RATES[side]))))
            late = len(trace.rows) - round(share * len(trace.rows))
            records = tuple(
                a_record(i, 9.0 if i < late else 0.1, input_tokens=32, output_tokens=row.output_tokens)
                for i, row in enumerate(trace.rows)
            )
            found[side] = ReplayResult(trace, records, 1.0, {}, ())
            self.rounds.append(Round(side, pair, datetime.now(UTC), found[side], None, self.reasons, True))
        return found


def _settled(plan: ComparePlan, context_tokens: int | None = 4096) -> Settled:
    load = Load(plan.rates[0] if plan.rates else 1.0, "as given", "as given")
    given = plan.model_dump(mode="json", exclude_unset=True)
    return Settled(given, plan.model_dump(mode="json"), load, {}, context_tokens, 100, 1)


@pytest.fixture
def compared(monkeypatch, tmp_path):
    """Return what compares some variants."""

    async def prepare(_variant, plan, *_):
        return _settled(plan)

    monkeypatch.setattr(module, "prepare", prepare)
    monkeypatch.setattr(module, "RoundRunner", _Runner)

    async def run(*variants: _Variant, plan: ComparePlan = PLAN):
        text = StringIO()
        plan = plan.model_copy(update={"variants": None, "server": [f"{one.mode}=http://h:1" for one in variants]})
        result = await compare(variants, plan, tmp_path, Console(file=text, width=250))
        return result, text.getvalue()

    return run


@pytest.fixture
async def found(compared):
    return await compared(_Variant("colocated"), _Variant("disaggregated"))


async def test_the_highest_rates_their_ratio_and_figures_per_device_are_found_and_written(found, tmp_path):
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert schema_problems(summary) == []
    for side in ("a", "b"):
        variant = summary["variants"][side]
        highest = variant["max_goodput_rate"]
        assert highest["rate"] == pytest.approx(MAX_RATES[side], rel=0.1)
        assert highest["low"] < MAX_RATES[side] < highest["high"]
        assert variant["per_device"]["rate_per_device"] == pytest.approx(highest["rate"] / 2)
        cost = 0.08 / 3600 / (highest["rate"] * 8) * 1e6
        assert variant["per_device"]["cost_per_million_output_tokens"] == pytest.approx(cost)
        assert variant["output_tokens_per_s"] == pytest.approx(8 * highest["rate"])
        rates = [point["rate"] for point in variant["points"]]
        assert rates == sorted(set(rates))
        assert sum(point["rounds"] for point in variant["points"]) == len(summary["rounds"]) / 2
    verdict = summary["verdict"]
    assert verdict["variants"] == ["disaggregated", "colocated"]
    assert verdict["serves_more"] == [["disaggregated", "colocated"]]
    assert verdict["ratios"][0]["low"] < 2 < verdict["ratios"][0]["high"]
    one = summary["rounds"][0]
    assert (one["rate"], one["total"], one["variant"]) == (1.0, 40, "b")
    assert one["attainment"] == one["met"] / one["total"]


async def test_terminal_and_page_say_the_same_and_the_page_can_be_written_again(found, tmp_path):
    result, terminal = found
    again = StringIO()
    page = result.report.read_text()
    result.report.unlink()
    report_again(tmp_path, Console(file=again, width=250))
    assert [sentence for sentence in result.summary["verdict"]["sentences"] if sentence not in page] == []
    page = result.report.read_text()
    for sentence in result.summary["verdict"]["sentences"]:
        assert sentence in page
        assert sentence in terminal
        assert sentence in again.getvalue()
    assert "pair 1 at 1 requests/s" in terminal
    narrow = StringIO()
    print_comparison(result.summary, Console(file=narrow, width=100))
    assert len(narrow.getvalue().splitlines()) <= 30


async def test_three_variants_are_judged_in_each_two(compared):
    result, _ = await compared(_Variant("colocated"), _Variant("disaggregated"), _Variant("vLLM"))
    verdict = result.summary["verdict"]
    assert {(one["one"], one["other"]) for one in verdict["ratios"]} == {
        ("disaggregated", "vLLM"),
        ("disaggregated", "colocated"),
        ("vLLM", "colocated"),
    }
    assert len(verdict["serves_more"]) == 3
    assert schema_problems(result.summary) == []
    found = result.summary["map"]
    own = next(cell for cell in found["cells"] if (cell["ttft_ms"], cell["tpot_ms"]) == (400, 60))
    assert (own["winner"], found["unit"]) == ("b", "requests/s")


async def test_given_rates_are_measured_in_turn(compared):
    plan = PLAN.model_copy(update={"rates": (1.0, 2.0), "pairs": 4})
    result, _ = await compared(_Variant("colocated"), _Variant("disaggregated"), plan=plan)
    assert [each["rate"] for each in result.summary["rounds"][::2]] == [1.0, 2.0, 1.0, 2.0]


async def test_rounds_at_any_rate_take_as_long(found):
    for each in found[0].summary["rounds"]:
        assert each["total"] == pytest.approx(39 * each["rate"] + 1, abs=0.6)


async def test_rounds_that_were_all_disturbed_conclude_nothing(compared, monkeypatch):
    monkeypatch.setattr(_Runner, "reasons", ("other work took 47% of this machine's CPU time",))
    result, _ = await compared(_Variant("colocated"), _Variant("disaggregated"))
    assert (result.summary["verdict"]["pairs"], result.summary["verdict"]["serves_more"]) == (0, ())


@pytest.mark.parametrize("most", [0.01, 1.6, 100.0])
async def test_a_single_pair_concludes_nothing(compared, monkeypatch, most):
    monkeypatch.setitem(MAX_RATES, "a", most)
    plan = PLAN.model_copy(update={"pairs": 1})
    result, _ = await compared(_Variant("colocated"), _Variant("disaggregated"), plan=plan)
    assert (len(result.summary["rounds"]), result.summary["verdict"]["serves_more"]) == (2, ())
    assert schema_problems(json.loads(json.dumps(result.summary))) == []


@pytest.mark.parametrize(
    ("variants", "named"),
    [
        ((_Variant("one", dtype="float16"), _Variant("two", dtype="bfloat16")), ("dtype", "float16", "bfloat16")),
        ((_Variant("one", cores=2), _Variant("two", cores=4)), ("devices", "2 in one", "4 in two")),
    ],
)
async def test_variants_that_are_not_equal_are_refused_and_shown_if_the_user_insists(compared, variants, named):
    with pytest.raises(UnequalError) as refused:
        await compared(*variants)
    assert all(word in str(refused.value).lower() for word in (*named, "--allow-unequal"))
    plan = PLAN.model_copy(update={"allow_unequal": True})
    result, terminal = await compared(*variants, plan=plan)
    assert all(word in result.report.read_text().lower() and word in terminal.lower() for word in named)


def _growing(folder: Path) -> Path:
    """Write an Azure trace of two windows of five requests, of which the second has the longer answers."""
    lines = [f"2023-11-16 18:00:{second:02},100,{10 if second < 5 else 200}" for second in range(10)]
    file = folder / "growing.csv"
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    return file


def test_no_request_of_a_later_window_is_given_up_within_its_limits(tmp_path):
    plan = PLAN.model_copy(update={"trace": str(_growing(tmp_path)), "limit": 5})
    traces = PairTraces(plan)
    longest = [max(row.output_tokens for row in traces.at_rate(pair, 1.0, 5).rows) for pair in range(traces.windows)]
    assert longest[0] < max(longest)
    assert bounded_deadline_s(plan, traces, QUIET) == pytest.approx(GIVEN_UP_AFTER * (0.4 + max(longest) * 0.06))


async def test_each_round_is_offered_at_the_rate_in_its_title_however_bursty_the_trace_is(
    compared, monkeypatch, tmp_path
):
    said = []

    class Watched(_Runner):
        async def pair(self, pair, trace, title):
            said.append((title, f"pair {pair + 1}, {trace.mean_rate:.3g} requests/s"))
            return await super().pair(pair, trace, title)

    monkeypatch.setattr(module, "RoundRunner", Watched)
    times_s = [*range(0, 40, 2), *(40 + step / 10 for step in range(20))]
    lines = [f"2023-11-16 18:00:{at:04.1f},32,8" for at in times_s]
    file = tmp_path / "bursts.csv"
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    plan = PLAN.model_copy(update={"trace": str(file), "limit": 20})
    await compared(_Variant("colocated"), _Variant("disaggregated"), plan=plan)
    assert len(said) > 2
    assert all(title == offered for title, offered in said)


def test_a_request_is_given_up_when_it_has_taken_twice_what_its_limits_allow():
    traces = PairTraces(PLAN)
    assert bounded_deadline_s(PLAN, traces, QUIET) == pytest.approx(GIVEN_UP_AFTER * (0.4 + 8 * 0.06))
    assert bounded_deadline_s(PLAN.model_copy(update={"deadline_s": 0.5}), traces, QUIET) == 0.5


async def test_a_comparison_is_finished_only_when_all_its_files_are_written(compared, monkeypatch, tmp_path):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_record_table", killed)
    with pytest.raises(KeyboardInterrupt):
        await compared(_Variant("colocated"), _Variant("disaggregated"))
    assert not (tmp_path / "summary.json").exists(), "--resume would call it finished"
