"""An engine that hangs is found as soon as its own steps allow, and its worker comes back on its own cores.

One `ridgeline serve` with the shipped time limits and a core for each worker, as a user has it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from cluster.config.models import SupervisionConfig
from engine.stall import LEAST_STILL_S, LONGEST_STEPS
from tests.engines.serve_process import serving, still_there
from tests.engines.served import Deployed, Stream
from tests.support.endless import compute_for_ever

Figure = Callable[[str], None]
pytestmark = pytest.mark.engines

TOKENS = 100
TIMEOUT_S = SupervisionConfig().stall_timeout_s
LOOK_S = 3.0
"""The worker looks every half a second, the supervisor hears of it within two."""


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    with serving("--prefill", "1", "--decode", "1", "--set", "model.max_model_len_tokens=1024") as serve:
        one = Deployed(serve, serve.wait_ready())
        one.completes()
        yield one


def busy_decode(deployed: Deployed) -> str:
    return next(row["worker"] for row in deployed.workers().values() if row["pool"] == "decode" and row["tasks"])


def test_a_stopped_engine_is_found_in_three_of_its_longest_steps_and_its_worker_comes_back_on_its_core(
    deployed: Deployed, figure: Figure
):
    stream = Stream(deployed.url, TOKENS)
    while len(stream.lines) < TOKENS // 4:
        time.sleep(0.01)
    name = busy_decode(deployed)
    engine = deployed.engine(name)
    core, longest_s = engine.cpu_affinity(), max(stream.gaps_s(0.0))
    engine.suspend()
    stopped_s = time.monotonic()
    deployed.serve.wait_said(f"{name} is gone .its engine has work and makes no step", TIMEOUT_S - LOOK_S)
    found_s = time.monotonic() - stopped_s
    figure(f"found {found_s:.1f} s after the stop; the stream's longest gap before was {longest_s:.2f} s")
    figure(deployed.back(name))
    assert still_there([engine], 0) == []
    assert deployed.engine(name).cpu_affinity() == core
    assert "could not be brought back" not in deployed.serve.output
    assert stream.end()[-1] == "data: [DONE]"
    assert any(f'"completion_tokens":{TOKENS}' in line for line in stream.lines[-3:]), stream.lines[-3:]
    # The first prompts may have taken longer steps than this stream's tokens: a full step takes two seconds here.
    assert found_s <= max(LEAST_STILL_S, LONGEST_STEPS * max(longest_s, 4.0)) + LOOK_S
    deployed.completes()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the code of another process")
def test_an_engine_that_computes_without_end_is_found_in_a_third_of_the_timeout(deployed: Deployed, figure: Figure):
    stream = Stream(deployed.url, TOKENS)
    while len(stream.lines) < TOKENS // 4:
        time.sleep(0.01)
    name = busy_decode(deployed)
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
    for _ in range(3):
        deployed.engine("worker-1").kill()
        deployed.serve.wait_said("worker-1 is gone .*(engine|process)", 30)
        deployed.back("worker-1")
    assert "could not be brought back" not in deployed.serve.output
    pids = [psutil.Process(row["pid"]).is_running() for row in deployed.workers().values()]
    assert pids == [True, True]
    deployed.completes()
