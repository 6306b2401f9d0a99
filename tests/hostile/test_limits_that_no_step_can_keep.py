"""One client asks for a time per token that no machine has; the prompts of others take what they took without it.

vLLM's real scheduler and ours, on a machine whose steps take a known time.
"""

import pytest

from ridgeline.engine.request.sampling import TPOT_LIMIT
from ridgeline.engine.step_scheduler import BoundedScheduler
from ridgeline.router.front.middleware.ingress import read_limit_s
from ridgeline.router.settings import SHORTEST_LIMIT_MS
from tests.support.stepping_scheduler import make


def ttft_s(stepping, **extra):
    """Of a prompt of 1,500 tokens beside a long stream."""
    for number in range(12):  # by these the scheduler learns how long steps take
        stepping.add(f"earlier {number}", 64 + 100 * number, 12)
    stepping.run()
    stepping.add("stream", 32, 3000, **extra)
    for _ in range(4):
        stepping.step()
    began_s = stepping.now_s
    stepping.add("polite", 1500, 2)
    while not stepping.tokens["polite"]:
        stepping.step()
    return stepping.now_s - began_s


@pytest.mark.parametrize("limit_ms", [SHORTEST_LIMIT_MS, 1.5])
def test_a_stream_with_a_limit_that_no_step_can_keep_costs_prompts_beside_it_at_most_as_much_again(
    limit_ms, tmp_path, monkeypatch
):
    for name in ("alone", "beside"):
        (tmp_path / name).mkdir()
    alone_s = ttft_s(make(BoundedScheduler, tmp_path / "alone", monkeypatch))
    limit = {TPOT_LIMIT: read_limit_s({b"x-ridgeline-tpot-ms": str(limit_ms).encode()}, b"x-ridgeline-tpot-ms")}
    beside_s = ttft_s(make(BoundedScheduler, tmp_path / "beside", monkeypatch), **limit)
    assert beside_s <= 2 * alone_s
