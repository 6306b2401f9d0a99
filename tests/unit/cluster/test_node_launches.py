"""What the log of Ray's monitor says about launches that failed; the lines are those of Ray 2.60."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from ridgeline.cluster.node_launches import RECENT_S, TAIL_BYTES, recent_failures

AT = datetime.fromisoformat("2026-11-29 15:36:40").astimezone()
NO_CAPACITY = "(InsufficientInstanceCapacity): We currently do not have sufficient p5.48xlarge capacity"
LOG = f"""\
2026-11-29 15:36:32,169\tINFO node_provider.py:485 -- Launching 1 nodes of type decode.
2026-11-29 15:36:32,194\tINFO node_provider.py:491 -- Failed to launch 1 nodes of type prefill: \
Node Launch Exception {NO_CAPACITY}
2026-11-29 15:36:33,000\tINFO threaded_ray_installer.py:81 -- Ray installation failed on instance i-1: update-failed
2026-11-29 15:36:33,001\tWARNING threaded_ray_installer.py:86 -- Failed to install ray, retrying...
2026-11-29 15:36:37,198\tINFO node_provider.py:491 -- Failed to launch 2 nodes of type decode: connection refused
2026-11-29 15:36:37,248\tINFO instance_manager.py:263 -- Update instance REQUESTED->ALLOCATION_FAILED (id=d, \
type=prefill, cloud_instance_id=, ray_id=): launch failed with \
Failed to launch 1 nodes of type prefill with request id 5: \n"""


def failures(folder: Path, log: str, after_s: float = 0.0) -> list[str]:
    (folder / "monitor.log").write_text(log)
    return recent_failures(folder, AT + timedelta(seconds=after_s))


def test_the_last_failure_of_each_type_and_node_is_told_with_its_reason(tmp_path):
    earlier = LOG.replace("15:36", "15:35").replace("refused", "reset")
    assert failures(tmp_path, earlier + LOG) == [
        f"the launch of prefill failed and is tried again: {NO_CAPACITY}",
        f"the set-up of i-1 failed and is tried again: {tmp_path}/monitor.out says how",
        "the launch of decode failed and is tried again: connection refused",
    ]


def test_what_failed_before_its_type_came_is_not_told_any_more(tmp_path):
    (tmp_path / "monitor.log").write_text(LOG)
    assert [one.split(" failed")[0] for one in recent_failures(tmp_path, AT, {"prefill", "decode"})] == [
        "the set-up of i-1"
    ]


@pytest.mark.parametrize(("after_s", "number"), [(RECENT_S - 10.0, 3), (RECENT_S - 5.0, 1), (RECENT_S, 0)])
def test_what_failed_a_while_ago_is_not_told_any_more(tmp_path, after_s, number):
    assert len(failures(tmp_path, LOG, after_s)) == number


def test_of_a_long_log_the_end_is_read(tmp_path):
    assert len(failures(tmp_path, LOG + "x" * (TAIL_BYTES - 100))) == 0
    assert len(failures(tmp_path, "x" * TAIL_BYTES + "\n" + LOG)) == 3


def test_on_another_machine_than_the_heads_there_is_no_log(tmp_path):
    assert recent_failures(tmp_path, AT) == []
