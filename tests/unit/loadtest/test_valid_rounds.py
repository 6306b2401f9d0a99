"""The runner of rounds, as far as it needs no server."""

from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.report.rounds import Round
from ridgeline.loadtest.valid_rounds import RoundRunner


def _runner(*rounds: tuple[str, int, float, bool]) -> RoundRunner:
    """Return a runner of two variants after rounds given as variant, pair, seconds, and whether the round was kept."""
    runner = RoundRunner(
        variants={"a": None, "b": None},
        plan=ComparePlan(),
        ordinals_per_round=1,
        next_round_index=0,
        cold=set(),
        is_alone=True,
        records_file=Path("records.jsonl"),
        console=Console(),
    )
    runner.rounds = [
        Round(side, pair, datetime.now(UTC), None, None, (), is_kept, took_s=took_s)
        for side, pair, took_s, is_kept in rounds
    ]
    return runner


def test_the_next_round_is_expected_to_take_as_long_as_those_after_the_first_start():
    assert _runner().longest_s == 0
    assert _runner(("a", 0, 60.0, True), ("b", 0, 40.0, True)).longest_s == 60
    started = (("a", 0, 60.0, True), ("b", 0, 40.0, True))
    assert _runner(*started, ("b", 1, 90.0, False), ("b", 1, 21.0, True), ("a", 1, 20.0, True)).longest_s == 21
