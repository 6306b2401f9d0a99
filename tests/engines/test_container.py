"""`ridgeline serve` as a container runs it: process 1 of its namespace, by a user id that no passwd entry knows."""

from __future__ import annotations

import signal
import subprocess

import psutil
import pytest

from tests.engines.serve_process import GONE_WITHIN_S, RIDGELINE, serving, still_there, words_of
from tests.engines.test_processes import ONE_REPLICA, completes

pytestmark = pytest.mark.engines
UNKNOWN_ID = 54_321
"""It owns here what the user who runs the test owns outside."""
IN_A_CONTAINER = (
    *("unshare", "--user", f"--map-user={UNKNOWN_ID}", f"--map-group={UNKNOWN_ID}"),
    *("--pid", "--fork", "--kill-child", "--mount-proc"),
)
BACK_WITHIN_S = 120.0


def test_process_1_of_an_unknown_user_serves_brings_an_engine_back_and_ends(small_model: dict[str, str]):
    tried = subprocess.run([*IN_A_CONTAINER, "true"], capture_output=True, text=True, check=False, timeout=20)
    if tried.returncode:
        pytest.skip(f"no namespaces of users and processes here: {tried.stderr.strip()}")
    with serving(
        *ONE_REPLICA, *words_of(small_model), program=(*IN_A_CONTAINER, str(RIDGELINE)), shares_parent=False
    ) as serve:
        url = serve.wait_ready()
        (first,) = psutil.Process(serve.process.pid).children()
        (engine,) = [each for each in first.children(recursive=True) if "EngineCore" in " ".join(each.cmdline())]
        engine.kill()
        serve.wait_said("worker-0: back after", BACK_WITHIN_S)
        completes(url)
        family = first.children(recursive=True)
        assert [each for each in family if each.status() == psutil.STATUS_ZOMBIE] == []
        first.send_signal(signal.SIGTERM)
        assert serve.wait_exit() == 0, serve.output
        assert still_there(family, GONE_WITHIN_S) == []
