"""Counts and times as people read them."""

import pytest

from ridgeline.loadtest.run.quantities import counted, minutes_text


@pytest.mark.parametrize(("count", "text"), [(0, "0 pairs"), (1, "1 pair"), (2, "2 pairs"), (1.5, "1.5 pairs")])
def test_a_noun_has_an_s_unless_there_is_exactly_one(count, text):
    assert counted(count, "pair") == text


def test_minutes_are_written_as_on_a_clock():
    assert [minutes_text(seconds) for seconds in (4.6, 59.7, 245.0)] == ["0:05 min", "1:00 min", "4:05 min"]
