"""The runner of rounds, as far as it needs no server."""

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console

from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.report.rounds import Round
from ridgeline.loadtest.run.calibration import Load
from ridgeline.loadtest.run_folder import Past, Settled
from ridgeline.loadtest.valid_rounds import RoundRunner

NOW = datetime.now(UTC)


def _longest_s(*rounds: tuple[str, int, float, bool]) -> float:
    """Return what a runner expects after rounds given as variant, pair, seconds, and whether the round was kept."""
    ran = tuple(
        Round(side, pair, NOW, None, None, (), is_kept, took_s=took_s) for side, pair, took_s, is_kept in rounds
    )
    settled = Settled({}, ComparePlan().model_dump(mode="json"), Load(1.0, "", ""), {}, None, 1, 0)
    past = Past(Path("nowhere"), NOW, settled, ran, 0.0, ())
    variants = [SimpleNamespace(mode=mode) for mode in ("one", "other")]
    return RoundRunner(variants, past, Console(), is_alone=True, began_s=0.0).longest_s


def test_the_next_round_is_expected_to_take_as_long_as_those_after_the_first_start():
    assert _longest_s() == 0
    assert _longest_s(("a", 0, 60.0, True), ("b", 0, 40.0, True)) == 60
    started = (("a", 0, 60.0, True), ("b", 0, 40.0, True))
    assert _longest_s(*started, ("b", 1, 90.0, False), ("b", 1, 21.0, True), ("a", 1, 20.0, True)) == 21
