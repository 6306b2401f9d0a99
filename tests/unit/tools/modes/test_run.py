"""What a run of the map of modes keeps, refuses and replays; nothing is started."""

from datetime import UTC, datetime

import pytest

from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.run.server import with_slo_headers
from ridgeline.loadtest.run.unloaded import Unloaded
from ridgeline.loadtest.trace.readers import load_trace
from ridgeline.loadtest.trace.windows import PairTraces
from tools.bench.modes.__main__ import options, settings_of
from tools.bench.modes.fleet import hopeless_after_s
from tools.bench.modes.journal import (
    Journal,
    Limits,
    Measured,
    Outcome,
    RoundEnded,
    RoundSpec,
    limits_of,
    read_journal,
)
from tools.bench.modes.map import requests_of
from tools.bench.modes.settings import Settings, save, saved
from tools.bench.modes.shift import PHASES, attainments, phase_rate, shifting_trace, slices

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02d}.0000000,{400 + 10 * second},{20 + second}\n" for second in range(60)
)
UNLOADED = Unloaded((768,), 16, 3.0, 3.0, 0.05, 8, 0.12, 16.0, {"colocated": 2})
FINISHED = (Outcome(1.0, 2.0),)


def _spec(variant: str = "colocated", cell=None, block: int = 1) -> RoundSpec:
    return RoundSpec("poisson", block, variant, 0.5, 0, 2, cell)


def _ended(spec: RoundSpec, number: int = 0, void: str | None = None, outcomes=FINISHED) -> RoundEnded:
    return RoundEnded(number, spec, datetime(2026, 1, 1, tzinfo=UTC), 9.0, outcomes, (), void, 90.0 + number, 512)


def _window(plan, window: int, requests: int, rate: float):
    return PairTraces(plan.model_copy(update={"limit": requests}), 4096).at_rate(window, rate)


def _settings(*words: str) -> Settings:
    return settings_of(options().parse_args(words))


def test_a_finished_round_is_found_again_and_a_line_that_was_cut_is_left_out(tmp_path):
    journal = Journal(tmp_path)
    journal.add(Measured("poisson", UNLOADED, 30.0))
    journal.add(_ended(_spec(), 0))
    with (tmp_path / "rounds.jsonl").open("ab") as lines:
        lines.write(b'{"type":"round","number":1,"spec"')
    again = read_journal(tmp_path)
    assert again.done(_spec()) == _ended(_spec(), 0)
    assert again.done(_spec("disaggregated")) is None
    again.add(_ended(_spec("disaggregated"), 1))
    last = read_journal(tmp_path)
    assert [each.number for each in last.rounds("poisson")] == [0, 1]
    assert (last.spent_s, last.next_number, last.next_ordinal) == (91.0, 2, 512)


def test_a_void_round_does_not_count_and_is_run_again(tmp_path):
    journal = Journal(tmp_path)
    journal.add(_ended(_spec(), 0, void="worker-1 left during the round"))
    assert journal.done(_spec()) is None
    assert not journal.rounds()
    assert journal.next_number == 1


def test_settings_are_read_back_as_they_were_given(tmp_path):
    given = _settings("--workloads", "poisson", "--rates", "poisson=0.4", "--set", "a.b=1")
    save(given, tmp_path)
    assert saved(tmp_path) == given
    assert given.rates == {"poisson": 0.4}
    assert given.overrides == {"a.b": "1"}


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path):
    with pytest.raises(LoadTestError, match="--resume"):
        saved(tmp_path)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("--code-trace", "nowhere.csv"), "give --conversation-trace"),
        (("--workloads", "code", "--code-trace", "nowhere.csv"), "give --code-trace"),
        (("--variants", "adaptive"), "--variants"),
        (("--variants", "colocated,quick"), "quick"),
        (("--workloads", "chat"), "--workloads"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_name_of_the_option(words, names):
    with pytest.raises(LoadTestError, match=names):
        _settings(*words).check()


def test_the_second_part_needs_no_trace():
    _settings("--part", "shift").check()


def test_a_slice_is_scaled_and_each_window_of_it_has_exactly_the_rate_asked_for(tmp_path):
    source = tmp_path / "azure.csv"
    source.write_text(AZURE)
    plan = requests_of("code", _settings("--code-trace", str(source)), tmp_path, 4096)
    rows = load_trace(plan.trace).rows
    assert len(rows) == 60
    assert (rows[0].input_tokens, rows[0].output_tokens) == (100, 10)
    first, second = (_window(plan, window, 10, 0.4) for window in (0, 1))
    assert first.mean_rate == pytest.approx(0.4)
    assert [row.input_tokens for row in second.rows] == [row.input_tokens for row in rows[10:20]]
    assert _window(plan, 6, 10, 0.4).rows == first.rows  # after the last window the first comes again


def test_windows_of_the_poisson_workload_have_arrivals_of_their_own_which_a_rate_only_stretches(tmp_path):
    plan = requests_of("poisson", _settings(), tmp_path, 4096)
    slow, fast, other = (_window(plan, *each) for each in ((3, 20, 0.5), (3, 20, 1.0), (4, 20, 0.5)))
    assert [row.arrival_s for row in slow.rows] == pytest.approx([2 * row.arrival_s for row in fast.rows])
    assert slow.rows != other.rows
    assert {(row.input_tokens, row.output_tokens) for row in slow.rows} == {(512, 64)}


def test_a_request_is_given_up_when_it_can_meet_no_limits_any_more():
    assert hopeless_after_s(Limits(24_000.0, 200.0), 64) == pytest.approx(36.8)


def test_limits_travel_as_headers_of_every_request(monkeypatch):
    monkeypatch.delenv("RIDGELINE_API_KEY", raising=False)
    servers = with_slo_headers("http://127.0.0.1:1", 10200.0, 112.5)
    assert servers.headers == {"x-ridgeline-ttft-ms": "10200", "x-ridgeline-tpot-ms": "112.5"}


def test_the_load_turns_from_long_prompts_to_long_answers_and_back():
    rates = [0.5, 0.2, 0.5]
    trace, parts = shifting_trace(rates, 60.0, 7), slices(rates, 60.0)
    assert trace.rows[0].arrival_s == 0.0
    assert [len(trace.rows[where]) for where in parts.values()] == [30, 12, 30, 72]
    for phase in PHASES:
        sizes = {(row.input_tokens, row.output_tokens) for row in trace.rows[parts[phase.name]]}
        assert sizes == {(phase.input_tokens, phase.output_tokens)}
    assert shifting_trace(rates, 60.0, 7) == trace != shifting_trace(rates, 60.0, 8)


def test_a_phase_is_as_heavy_as_its_share_of_both_workers():
    limits = limits_of(UNLOADED, 5.0, 2.0)
    assert limits == Limits(15000.0, 100.0)
    full, half = (phase_rate(PHASES[0], UNLOADED, limits, share, 2) for share in (1.0, 0.5))
    assert full == pytest.approx(2 * half)
    assert 0.5 < full < 2 / 3.0  # two prompts of 3 s at a time, and their answers


def test_attainment_is_told_by_phase_with_the_difference_from_the_best_other_mode():
    good, bad, limits = Outcome(100.0, 10.0), Outcome(None), Limits(1000.0, 50.0)
    parts = {"first": slice(0, 2), "second": slice(2, 4)}
    rounds = [
        _ended(_spec("colocated"), 0, outcomes=(good, bad, good, good)),
        _ended(_spec("disaggregated"), 1, outcomes=(bad, bad, bad, good)),
        _ended(_spec("adaptive"), 2, outcomes=(good, good, good, good)),
    ]
    found = attainments(rounds, ("colocated", "disaggregated", "adaptive"), limits, parts)
    assert found["first"]["colocated"]["attainment"] == 0.5
    assert found["first"]["difference"]["from"] == "colocated"
    assert found["first"]["difference"]["mean"] == 0.5
    assert found["second"]["difference"]["mean"] == 0.0
