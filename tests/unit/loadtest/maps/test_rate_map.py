"""The map of rates over SLOs, on rounds whose latencies are known. All data are simulated."""

import pytest

from loadtest.maps.grid import Grid
from loadtest.maps.rate_map import RateMap, rate_map
from loadtest.run.records import RequestRecord

GRID = Grid((1000.0, 8000.0, 60000.0), (100.0, 500.0), "by hand")
RATES = (1.0, 1.4, 2.0, 2.8, 4.0)


def _record(index: int, ttft_s: float, tpot_s: float) -> RequestRecord:
    return RequestRecord(
        index=index,
        scheduled_s=0.0,
        sent_s=0.0,
        input_tokens=32,
        output_tokens=11,
        requested_output_tokens=11,
        ttft_s=ttft_s,
        second_token_s=ttft_s + tpot_s,
        latency_s=ttft_s + 10 * tpot_s,
        itls_s=(tpot_s,) * 10,
    )


def _variant(queue_from: float, tpot_s: float):
    """Return three rounds of 80 requests at each rate; every TTFT is 0.5 s below the rate `queue_from`, else 5 s."""
    return [
        (rate, [_record(i, 0.5 if rate < queue_from else 5.0, tpot_s) for i in range(80)])
        for rate in RATES
        for _ in range(3)
    ]


def _map(rounds, deadline_s=60.0) -> RateMap:
    return rate_map(rounds, {variant: f"variant {variant}" for variant in rounds}, GRID, 0.9, deadline_s, "requests/s")


def _winners(found: RateMap) -> dict[tuple[float, float], str]:
    return {(cell.ttft_ms, cell.tpot_ms): cell.winner for cell in found.cells}


def test_each_variant_wins_where_its_own_latencies_allow_the_higher_rate():
    found = _map({"a": _variant(3.5, 0.3), "b": _variant(1.2, 0.05), "c": _variant(1.7, 0.3)})
    winners = _winners(found)
    assert winners[1000.0, 500.0] == "a"
    assert winners[1000.0, 100.0] == "b"
    assert winners[8000.0, 500.0] == "unclear"
    max_goodput_rates = next(
        cell.max_goodput_rates for cell in found.cells if (cell.ttft_ms, cell.tpot_ms) == (1000.0, 500.0)
    )
    assert max_goodput_rates["a"].rate == pytest.approx(3.0, rel=0.1)
    assert (max_goodput_rates["a"].low, max_goodput_rates["a"].high) == (2.8, 4.0)
    assert "variant a holds the maximum goodput rate at 1" in found.sentence


def test_an_variant_whose_interval_touches_another_s_wins_nothing():
    assert _winners(_map({"a": _variant(1.7, 0.3), "b": _variant(1.7, 0.3)}))[1000.0, 500.0] == "unclear"


def test_limits_that_no_variant_held_at_any_rate_are_unreachable():
    found = _map({"a": _variant(3.5, 0.3), "b": _variant(1.2, 0.3)})
    assert _winners(found)[1000.0, 100.0] == "unreachable"
    assert "held by no variant at any rate measured" in found.sentence


def test_limits_within_which_a_request_could_have_been_given_up_are_not_judged():
    found = _map({"a": _variant(3.5, 0.3), "b": _variant(1.2, 0.05)}, deadline_s=9.1)
    winners = _winners(found)
    assert winners[60000.0, 100.0] == winners[8000.0, 500.0] == "not measured"
    assert winners[8000.0, 100.0] != "not measured"  # 8 s and ten gaps and the first token's of 0.1 s are 9.1 s
    assert found.measured == {"a": (1.0, 4.0), "b": (1.0, 4.0)}
