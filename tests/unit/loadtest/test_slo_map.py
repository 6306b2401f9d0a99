"""Maps over SLOs, on records whose latencies are known. All data are simulated."""

import random
from functools import partial

import pytest

from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.run.records import RequestRecord
from ridgeline.loadtest.run.unloaded import Unloaded
from ridgeline.loadtest.slo_maps import SloGrid, SloMap, grid_of, rate_map, winner_map
from ridgeline.loadtest.statistics.outcome import conclude
from tests.support.load_records import a_record

RATE_GRID = SloGrid((1000.0, 8000.0, 60000.0), (100.0, 500.0), "by hand")
RATES = (1.0, 1.4, 2.0, 2.8, 4.0)
GRID = SloGrid((100.0, 400.0, 5000.0), (20.0, 60.0, 500.0), "by hand")


def _round(seed: int, ttft_s: float, tpot_s: float, requests: int = 40) -> list[RequestRecord]:
    spread = random.Random(seed)
    return [a_record(i, ttft_s * spread.uniform(0.9, 1.1), tpot_s * spread.uniform(0.9, 1.1)) for i in range(requests)]


def _pairs(variants: dict[str, tuple[float, float]], pairs: int = 6):
    return [
        {variant: _round(97 * pair + place, *latencies) for place, (variant, latencies) in enumerate(variants.items())}
        for pair in range(pairs)
    ]


def _winners(pairs, labels):
    found = winner_map(pairs, labels, GRID, partial(conclude, looks=(len(pairs),), most_pairs=len(pairs), margin=0.05))
    return {(cell.ttft_ms, cell.tpot_ms): cell.winner for cell in found.cells}, found


def test_each_variant_wins_where_only_its_own_latencies_meet_the_limits():
    pairs = _pairs({"a": (0.2, 0.1), "b": (1.0, 0.04)})
    winners, found = _winners(pairs, {"a": "early", "b": "even"})
    assert winners[400.0, 500.0] == "a"
    assert winners[5000.0, 60.0] == "b"
    assert winners[5000.0, 500.0] == "equivalent"
    assert winners[400.0, 60.0] == winners[100.0, 500.0] == "unreachable"
    assert "early meets 1 for more requests" in found.sentence
    assert "even meets 1 for more requests" in found.sentence


def test_a_cell_holds_what_the_primary_outcome_would_hold_at_its_limits():
    cell = next(
        cell
        for cell in _winners(_pairs({"a": (0.4, 0.04), "b": (1.0, 0.04)}), {"a": "a", "b": "b"})[1].cells
        if (cell.ttft_ms, cell.tpot_ms) == (400.0, 60.0)
    )
    assert cell.attainment["b"] == 0
    assert 0.3 < cell.attainment["a"] < 0.7
    [difference] = cell.differences
    assert difference.mean == pytest.approx(-cell.attainment["a"])
    assert difference.low < difference.mean < difference.high < 0
    assert len(cell.attainment_by_pair["a"]) == 6


def test_fewer_than_six_pairs_show_no_winner():
    winners, _ = _winners(_pairs({"a": (0.2, 0.1), "b": (1.0, 0.04)}, pairs=5), {"a": "a", "b": "b"})
    assert not {"a", "b", "equivalent"} & set(winners.values())


def test_of_three_variants_one_wins_a_cell_only_if_it_beats_both_others():
    labels = {"a": "a", "b": "b", "c": "c"}
    winners, _ = _winners(_pairs({"a": (0.2, 0.04), "b": (0.2, 0.04), "c": (1.0, 0.04)}), labels)
    assert winners[400.0, 60.0] == "unclear", "a and b both beat c and not each other"
    winners, _ = _winners(_pairs({"a": (0.2, 0.04), "b": (1.0, 0.04), "c": (1.0, 0.04)}), labels)
    assert winners[400.0, 60.0] == "a"


def test_a_failed_request_meets_no_limits():
    pairs = [
        {
            "a": [a_record(i, 0.1, 0.01) for i in range(20)],
            "b": [a_record(i, 0.1, 0.01, error="broken") for i in range(20)],
        }
        for _ in range(6)
    ]
    assert _winners(pairs, {"a": "a", "b": "b"})[0][5000.0, 500.0] == "a"


def test_the_grid_is_made_of_unloaded_figures_else_of_quantiles_and_holds_the_comparisons_own_limits():
    pairs, own = _pairs({"a": (0.2, 0.1), "b": (1.0, 0.04)}), Slo(ttft_ms=777, tpot_ms=55)
    unloaded = Unloaded((100,), 8, 0.1, 0.1, 0.02, 4, 0.001, 0.03, {})
    grid = grid_of(pairs, unloaded, own)
    assert grid is not None
    assert {150.0, 300.0, 777.0} <= set(grid.ttft_ms)
    assert {22.0, 50.0, 55.0} <= set(grid.tpot_ms)
    measured = grid_of(pairs, None, own)
    assert measured is not None
    assert 777.0 in measured.ttft_ms
    assert measured.ttft_ms == tuple(sorted(measured.ttft_ms))
    assert 150 < measured.ttft_ms[0] < measured.ttft_ms[-1] < 1200
    assert grid_of([{"a": [a_record(0, 0.1, 0.1, error="broken")], "b": []}], None, own) is None


# --- maximum goodput rates


def _variant(queue_from: float, tpot_s: float):
    """Return three rounds of 80 requests at each rate; every TTFT is 0.5 s below the rate `queue_from`, else 5 s."""
    return [
        (rate, [a_record(i, 0.5 if rate < queue_from else 5.0, tpot_s) for i in range(80)])
        for rate in RATES
        for _ in range(3)
    ]


def _map(rounds, deadline_s=60.0) -> SloMap:
    labels = {variant: f"variant {variant}" for variant in rounds}
    return rate_map(rounds, labels, RATE_GRID, 0.9, deadline_s, "requests/s")


def _rate_winners(found: SloMap) -> dict[tuple[float, float], str]:
    return {(cell.ttft_ms, cell.tpot_ms): cell.winner for cell in found.cells}


def test_each_variant_wins_where_its_own_latencies_allow_the_higher_rate():
    found = _map({"a": _variant(3.5, 0.3), "b": _variant(1.2, 0.05), "c": _variant(1.7, 0.3)})
    winners = _rate_winners(found)
    assert winners[1000.0, 500.0] == "a"
    assert winners[1000.0, 100.0] == "b"
    assert winners[8000.0, 500.0] == "unclear"
    max_goodput_rates = next(
        cell.max_goodput_rates for cell in found.cells if (cell.ttft_ms, cell.tpot_ms) == (1000.0, 500.0)
    )
    assert max_goodput_rates["a"].rate == pytest.approx(3.3, rel=0.15)
    assert 2.0 <= max_goodput_rates["a"].low < 3.0 < max_goodput_rates["a"].high <= 4.0
    assert "variant a holds the maximum goodput rate at 1" in found.sentence


def test_an_variant_whose_interval_touches_another_s_wins_nothing():
    winners = _rate_winners(_map({"a": _variant(1.7, 0.3), "b": _variant(1.7, 0.3)}))
    assert winners[1000.0, 500.0] in ("unclear", "equivalent")


def test_limits_that_no_variant_held_at_any_rate_are_unreachable():
    found = _map({"a": _variant(3.5, 0.3), "b": _variant(1.2, 0.3)})
    assert _rate_winners(found)[1000.0, 100.0] == "unreachable"
    assert "held by no variant at any rate measured" in found.sentence


def test_limits_within_which_a_request_could_have_been_given_up_are_not_judged():
    found = _map({"a": _variant(3.5, 0.3), "b": _variant(1.2, 0.05)}, deadline_s=9.1)
    winners = _rate_winners(found)
    assert winners[60000.0, 100.0] == winners[8000.0, 500.0] == "not measured"
    assert winners[8000.0, 100.0] != "not measured"  # 8 s and ten gaps and the first token's of 0.1 s are 9.1 s
    assert found.measured == {"a": (1.0, 4.0), "b": (1.0, 4.0)}
