"""An engine that computes without end is found long before the timeout, and a worker comes back on its own cores.

One `ridgeline serve` with a core for each worker, as a user has it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.engines.endless import compute_for_ever
from tests.engines.serve_process import still_there
from tests.engines.served import Deployed, Stream, deployed_by_serve

Figure = Callable[[str], None]
pytestmark = pytest.mark.engines

TOKENS = 100
TIMEOUT_S = 30.0
"""Half of the shipped one, of which this is to find a third."""
LOOK_S = 3.0
"""The worker looks every half a second, the supervisor hears of it within two."""


@pytest.fixture(scope="module")
def deployed(small_model: dict[str, str]) -> Iterator[Deployed]:
    with deployed_by_serve(settings={**small_model, "supervision.stall_timeout_s": str(TIMEOUT_S)}) as one:
        yield one


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the code of another process")
def test_an_engine_that_computes_without_end_is_found_in_a_third_of_the_timeout(deployed: Deployed, figure: Figure):
    stream = Stream(deployed.url, TOKENS)
    while len(stream.lines) < TOKENS // 4:
        time.sleep(0.01)
    name = deployed.busy_decode()
    engine = deployed.engine(name)
    compute_for_ever(engine.pid)
    began_s = time.monotonic()
    deployed.serve.wait_said(f"{name} is gone .its engine has work and makes no step", TIMEOUT_S - LOOK_S)
    figure(f"found {time.monotonic() - began_s:.1f} s after it computed without end")
    figure(deployed.back(name))
    assert still_there([engine], 0) == []
    assert stream.end()[-1] == "data: [DONE]"
    assert any(f'"completion_tokens":{TOKENS}' in line for line in stream.lines[-3:]), stream.lines[-3:]
    deployed.completes()


def test_a_worker_whose_engine_is_killed_again_and_again_finds_its_cores_free_each_time(deployed: Deployed):
    core = deployed.engine("worker-1").cpu_affinity()
    for _ in range(2):
        deployed.engine("worker-1").kill()
        deployed.serve.wait_said("worker-1 is gone .*(engine|process)", 30)
        deployed.back("worker-1")
        assert deployed.engine("worker-1").cpu_affinity() == core
    assert "could not be brought back" not in deployed.serve.output
    pids = [psutil.Process(row["pid"]).is_running() for row in deployed.workers().values()]
    assert pids == [True, True]
    deployed.completes()
