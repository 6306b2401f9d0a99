"""What /metrics says a client waited is what the client says: a real router, real hosts, engines of known times."""

import pytest

from tests.replay.clocks import Latencies, measure

OUTPUT_TOKENS = 25
MOST_ROUNDS = 4
ENOUGH = 0.95
"""Of the observations: other processes may hold the cores while one side looks at its clock."""


@pytest.mark.parametrize("streams", [1, 20])
async def test_ttft_and_itl_of_the_server_are_the_clients_within_a_bucket(url, streams):
    for _ in range(MOST_ROUNDS):
        seen = await measure(url, streams, 40, OUTPUT_TOKENS)
        requests = len(seen["ttft"].client_s)
        assert sum(seen["ttft"].server) == requests
        assert sum(seen["itl"].server) == requests * (OUTPUT_TOKENS - 1)
        if min(latencies.share_within_a_bucket for latencies in seen.values()) >= ENOUGH:
            return
    pytest.fail("; ".join(map(str, seen.values())))


def test_clocks_that_differ_by_more_than_a_bucket_are_told_apart():
    bounds_s = (0.01, 0.025, 0.05, 0.1, float("inf"))
    near = Latencies("itl", (0.02, 0.03, 0.06), bounds_s, (1, 1, 1, 0, 0))
    far = Latencies("itl", (0.06, 0.06, 0.06), bounds_s, (1, 1, 1, 0, 0))
    lost = Latencies("itl", (0.02, 0.03, 0.06), bounds_s, (1, 1, 0, 0, 0))
    assert near.share_within_a_bucket == 1
    assert far.share_within_a_bucket == pytest.approx(1 / 3)
    assert lost.share_within_a_bucket == pytest.approx(2 / 3)
