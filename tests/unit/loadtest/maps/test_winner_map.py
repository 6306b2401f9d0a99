"""The map of winners over SLOs, on records whose latencies are known. All data are simulated."""

import random
from functools import partial

import pytest

from loadtest.maps.grid import Grid, grid_of
from loadtest.maps.winner_map import winner_map
from loadtest.plan import Slo
from loadtest.run.records import RequestRecord
from loadtest.run.unloaded import Unloaded
from loadtest.statistics.outcome import conclude

GRID = Grid((100.0, 400.0, 5000.0), (20.0, 60.0, 500.0), "by hand")


def _record(index: int, ttft_s: float, tpot_s: float, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        index=index,
        scheduled_s=float(index),
        sent_s=float(index),
        input_tokens=100,
        output_tokens=11,
        ttft_s=ttft_s,
        second_token_s=ttft_s + tpot_s,
        latency_s=ttft_s + 10 * tpot_s,
        itls_s=(tpot_s,) * 10,
        error=error,
    )


def _round(seed: int, ttft_s: float, tpot_s: float, requests: int = 40) -> list[RequestRecord]:
    spread = random.Random(seed)
    return [_record(i, ttft_s * spread.uniform(0.9, 1.1), tpot_s * spread.uniform(0.9, 1.1)) for i in range(requests)]


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
        {"a": [_record(i, 0.1, 0.01) for i in range(20)], "b": [_record(i, 0.1, 0.01, "broken") for i in range(20)]}
        for _ in range(6)
    ]
    assert _winners(pairs, {"a": "a", "b": "b"})[0][5000.0, 500.0] == "a"


def test_the_grid_is_made_of_unloaded_figures_else_of_quantiles_and_holds_the_comparisons_own_limits():
    pairs, own = _pairs({"a": (0.2, 0.1), "b": (1.0, 0.04)}), Slo(ttft_ms=777, tpot_ms=55)
    unloaded = Unloaded((100,), 8, 0.1, 0.1, 0.02, 4, 0.03, 8.0, {})
    grid = grid_of(pairs, unloaded, own)
    assert grid is not None
    assert {150.0, 300.0, 777.0} <= set(grid.ttft_ms)
    assert {22.0, 50.0, 55.0} <= set(grid.tpot_ms)
    measured = grid_of(pairs, None, own)
    assert measured is not None
    assert 777.0 in measured.ttft_ms
    assert measured.ttft_ms == tuple(sorted(measured.ttft_ms))
    assert 150 < measured.ttft_ms[0] < measured.ttft_ms[-1] < 1200
    assert grid_of([{"a": [_record(0, 0.1, 0.1, "broken")], "b": []}], None, own) is None
