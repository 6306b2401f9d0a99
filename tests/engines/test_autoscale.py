"""A pool follows its load with real engines: one more worker under load, and one fewer when it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.engines.served import Stream, deployed_by_serve

Figure = Callable[[str], None]
pytestmark = [pytest.mark.engines, pytest.mark.long]

CLIENTS = 12
OUTPUT_TOKENS = 16
"""Short, so that more than twenty requests come in the thirty seconds that are looked at."""
SETTINGS = {
    "ray.share_cores": "true",
    "model.max_model_len": "1024",
    "pools.colocated.workers": "1",
    "pools.colocated.kv_cache_memory_bytes": "128 MiB",
    "pools.colocated.max_num_batched_tokens": "128",
    "pools.colocated.max_num_seqs": "4",  # the others wait
    "router.slo.ttft_ms": "1000",
    "autoscale.mode": "act",
    "autoscale.interval_s": "3",
    "autoscale.colocated.min_workers": "1",
    "autoscale.colocated.max_workers": "2",
}
CHANGED_WITHIN_S = 120.0


def test_under_load_a_second_engine_comes_serves_and_goes_again_when_the_load_is_over(figure: Figure):
    with deployed_by_serve("--mode", "colocated", settings=SETTINGS) as deployed:
        serve = deployed.serve
        with under_load(deployed.url) as ends:
            began_s = time.monotonic()
            serve.wait_said(r"operation \S+: autoscale, colocated from 1 to 2 workers: \d+ requests", CHANGED_WITHIN_S)
            figure(f"ordered {time.monotonic() - began_s:.1f} s after the load began")
            until(lambda: deployed.metrics().sum("ridgeline_wanted_workers", pool="colocated") == 2)
            until(lambda: deployed.metrics().sum("ridgeline_steps_total", worker="worker-1") > 0)
            figure(f"the second worker makes steps {time.monotonic() - began_s:.1f} s after the load began")
        assert set(ends) == {"data: [DONE]"}
        over_s = time.monotonic()
        serve.wait_said(r"autoscale, colocated from 2 to 1 workers: \d+ requests", CHANGED_WITHIN_S)
        until(lambda: len(deployed.workers()) == 1)
        figure(f"one worker again {time.monotonic() - over_s:.1f} s after the load was over")
        deployed.completes()


@contextmanager
def under_load(url: str) -> Iterator[list[str]]:
    """More clients than one worker has places, each with one answer after the other; yields how these ended."""
    ends: list[str] = []
    over = threading.Event()

    def client() -> None:
        while not over.is_set():
            ends.append(Stream(url, OUTPUT_TOKENS).end()[-1])

    clients = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for one in clients:
        one.start()
    try:
        yield ends
    finally:
        over.set()
        for one in clients:
            one.join()


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + CHANGED_WITHIN_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
