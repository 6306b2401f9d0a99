"""The seconds over which the rates of a replay are computed."""

import pytest

from ridgeline.loadtest.run.replay import ReplayResult
from ridgeline.loadtest.trace.trace import Trace, TraceRow
from tests.support.load_records import a_record


def _window_s(rows: list[TraceRow], due_s: list[float], duration_s: float = 500.0) -> float:
    records = tuple(a_record(index, 0.1, scheduled_s=at_s, sent_s=at_s) for index, at_s in enumerate(due_s))
    return ReplayResult(Trace("t", tuple(rows)), records, duration_s, None, ()).window_s


def test_it_lasts_to_the_last_arrival_and_one_mean_gap_more():
    assert _window_s([TraceRow(at_s, 10, 10) for at_s in (0.0, 1.0, 4.0)], [0.0, 1.0, 4.0]) == pytest.approx(6.0)


def test_a_later_turn_of_a_session_arrives_when_it_is_due_and_not_with_the_first():
    rows = [TraceRow(float(number), 10, 10, session=str(number), think_s=60.0) for number in (0, 1) for _ in range(2)]
    assert _window_s(rows, [0.0, 62.0, 1.0, 90.0]) == pytest.approx(120.0)


def test_requests_that_all_come_at_once_have_the_whole_replay():
    assert _window_s([TraceRow(0.0, 10, 10)] * 3, [0.0] * 3) == 500.0
