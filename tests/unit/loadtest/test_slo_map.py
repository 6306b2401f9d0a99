"""Maps over SLOs, on records whose latencies are known. All data are simulated."""

import pytest

from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.run.unloaded import Unloaded
from ridgeline.loadtest.slo_map import SloGrid, SloMap, grid_of, rate_map
from tests.support.load_records import a_record

GRID = SloGrid((1000.0, 8000.0, 60000.0), (100.0, 500.0), "by hand")
RATES = (1.0, 1.4, 2.0, 2.8, 4.0)


def _variant(queue_from: float, tpot_s: float, **changes):
    """Return three rounds of 80 requests at each rate; every TTFT is 0.5 s below the rate `queue_from`, else 5 s."""
    return [
        (rate, [a_record(i, 0.5 if rate < queue_from else 5.0, tpot_s, **changes) for i in range(80)])
        for rate in RATES
        for _ in range(3)
    ]


def _map(rounds, deadline_s: float = 60.0, undisturbed_pairs: int = 15) -> SloMap:
    labels = {variant: f"variant {variant}" for variant in rounds}
    return rate_map(rounds, labels, GRID, 0.9, deadline_s, undisturbed_pairs)


def _winners(found: SloMap) -> dict[tuple[float, float], str]:
    return {(cell.ttft_ms, cell.tpot_ms): cell.winner for cell in found.cells}


def test_the_grid_is_made_of_unloaded_figures_else_of_quantiles_and_holds_the_comparisons_own_slos():
    records = [a_record(i, (0.2, 1.0)[i % 2] * (1 + i / 1000), (0.1, 0.04)[i % 2]) for i in range(200)]
    own = Slo(ttft_ms=777, tpot_ms=55)
    grid = grid_of(records, Unloaded((100,), 8, 0.1, 0.1, 0.02, 4, 0.03, 8.0, {}), own)
    assert grid is not None
    assert {150.0, 300.0, 777.0} <= set(grid.ttft_ms)
    assert {22.0, 50.0, 55.0} <= set(grid.tpot_ms)
    measured = grid_of(records, None, own)
    assert measured is not None
    assert 777.0 in measured.ttft_ms
    assert measured.ttft_ms == tuple(sorted(measured.ttft_ms))
    assert 150 < measured.ttft_ms[0] < measured.ttft_ms[-1] < 1200
    assert grid_of([a_record(0, 0.1, 0.1, error="broken")], None, own) is None


def test_each_variant_wins_where_its_own_latencies_allow_the_higher_rate():
    found = _map({"a": _variant(3.5, 0.3), "b": _variant(1.2, 0.05), "c": _variant(1.7, 0.3)})
    winners = _winners(found)
    assert winners[1000.0, 500.0] == "a", "it beats both others"
    assert winners[1000.0, 100.0] == "b"
    assert winners[8000.0, 500.0] == "unclear"
    cell = next(cell for cell in found.cells if (cell.ttft_ms, cell.tpot_ms) == (1000.0, 500.0))
    held = cell.max_goodput_rates["a"]
    assert held.rate == pytest.approx(3.3, rel=0.15)
    assert 2.0 <= held.low < 3.0 < held.high <= 4.0
    assert "variant a serves more at 1" in found.sentence


def test_of_three_variants_one_that_beats_only_one_other_wins_nothing():
    winners = _winners(_map({"a": _variant(3.5, 0.3), "b": _variant(3.5, 0.3), "c": _variant(1.2, 0.3)}))
    assert winners[1000.0, 500.0] == "unclear"


def test_fewer_than_two_undisturbed_pairs_show_no_winner():
    found = _map({"a": _variant(3.5, 0.3), "b": _variant(1.2, 0.05)}, undisturbed_pairs=1)
    assert not {"a", "b", "alike"} & set(_winners(found).values())


def test_a_failed_request_meets_no_slos():
    found = _map({"a": _variant(3.5, 0.05), "b": _variant(3.5, 0.05, error="broken")})
    assert _winners(found)[1000.0, 100.0] == "a"


def test_slos_that_no_variant_held_at_any_rate_are_unreachable():
    found = _map({"a": _variant(3.5, 0.3), "b": _variant(1.2, 0.3)})
    assert _winners(found)[1000.0, 100.0] == "unreachable"
    assert "held by no variant at any rate measured" in found.sentence


def test_slos_that_a_variant_held_at_the_only_rate_measured_are_not_out_of_reach():
    records = [a_record(i, 0.5 if i else 5.0, 0.05) for i in range(20)]
    found = _map({"a": [(1.44, records)], "b": [(1.44, records)]}, undisturbed_pairs=1)
    assert _winners(found)[1000.0, 100.0] == "unclear"


def test_slos_within_which_a_request_could_have_been_given_up_are_not_judged():
    found = _map({"a": _variant(3.5, 0.3), "b": _variant(1.2, 0.05)}, deadline_s=9.1)
    winners = _winners(found)
    assert winners[60000.0, 100.0] == winners[8000.0, 500.0] == "not measured"
    assert winners[8000.0, 100.0] != "not measured"  # 8 s and ten gaps and the first token's of 0.1 s are 9.1 s
