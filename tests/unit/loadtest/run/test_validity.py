"""Rounds that say nothing: workers that were lost, a disturbed machine, a late client."""

import os
import socket
import subprocess
import sys

import psutil
import pytest

from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.run.machine import CpuReading, Disturbance, disturbance, listeners, read_cpu
from ridgeline.loadtest.run.records import RequestRecord
from ridgeline.loadtest.run.replay import ReplayResult
from ridgeline.loadtest.run.server_metrics import fleet_change, parse_metrics, steps_by_worker, workers_of
from ridgeline.loadtest.trace.trace import Trace
from ridgeline.loadtest.valid_rounds import discard_reasons

SLO = Slo(ttft_ms=2000, tpot_ms=100)


def _round(*lags_s: float, change: str | None = None) -> ReplayResult:
    records = tuple(RequestRecord(i, float(i), i + lag_s, 10) for i, lag_s in enumerate(lags_s))
    return ReplayResult(Trace("t", ()), records, 1.0, None, (), change)


def test_a_client_may_be_late_by_a_share_of_the_ttft_limit_and_no_more():
    assert discard_reasons(_round(*[0.03] * 200), None, SLO) == ()
    assert "the TTFT SLO allows 40 and 200 ms" in discard_reasons(_round(*[0.05] * 200), None, SLO)[0]
    assert discard_reasons(_round(*[0.0] * 999, 0.19), None, SLO) == ()
    assert "the latest 210 ms" in discard_reasons(_round(*[0.0] * 999, 0.21), None, SLO)[0]
    assert discard_reasons(_round(*[0.05] * 200), None, Slo(ttft_ms=20_000)) == ()


def test_a_machine_that_others_use_voids_a_round():
    assert discard_reasons(_round(0.0), Disturbance(stolen=0.04, other=0.09), SLO) == ()
    stolen, other = discard_reasons(_round(0.0), Disturbance(stolen=0.06, other=0.4), SLO)
    assert "6% of this machine's CPU time to other guests" in stolen
    assert "other work took 40%" in other
    assert discard_reasons(_round(0.0, change="worker-1 (decode) left during the round"), None, SLO) == (
        "worker-1 (decode) left during the round",
    )


def test_others_took_what_is_neither_idle_nor_stolen_nor_ours():
    before = CpuReading(all_s=100.0, idle_s=50.0, stolen_s=1.0, ours_s={1: 10.0, 2: 90.0})
    after = CpuReading(all_s=120.0, idle_s=58.0, stolen_s=2.0, ours_s={1: 15.0, 3: 2.0})
    found = disturbance(before, after)
    assert (found.stolen, found.other) == (pytest.approx(0.05), pytest.approx(4 / 20))
    assert disturbance(before, before) == Disturbance(0.0, 0.0)


def test_the_time_of_a_worker_that_was_killed_is_not_taken_from_the_others():
    before = CpuReading(all_s=100.0, idle_s=50.0, stolen_s=0.0, ours_s={1: 10.0, 2: 90.0})
    after = CpuReading(all_s=120.0, idle_s=60.0, stolen_s=0.0, ours_s={1: 16.0})
    assert disturbance(before, after).other == pytest.approx(4 / 20)


def _ours_s(serving=None) -> float:
    return sum(read_cpu(serving).ours_s.values())


def test_this_machine_can_be_read():
    first, second = read_cpu(), read_cpu()
    assert 0 < sum(first.ours_s.values()) <= sum(second.ours_s.values())
    assert first.all_s <= second.all_s


def test_what_serves_the_other_variant_is_other_work_and_what_serves_this_one_is_not():
    burner = "import os, time\nwhile sum(os.times()[:2]) < 1: pass\nprint(flush=True)\nimport sys; sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", burner], **pipes) as child:
        child.stdout.readline()
        started_here_s, serving_s, idle_s = _ours_s(), _ours_s([child.pid]), _ours_s([])
        child.stdin.close()
    burnt_s = 0.95  # of one second; the kernel counts in hundredths
    assert started_here_s > idle_s + burnt_s
    assert serving_s > idle_s + burnt_s
    assert _ours_s([child.pid]) > serving_s - burnt_s / 2, "a process that has ended takes nothing along"


def test_the_processes_of_a_url_are_those_that_listen_there_on_this_machine():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert listeners(url) == {os.getpid()}
    assert listeners(url) is None, "nobody who can be seen"
    assert listeners("http://192.0.2.1:80") == frozenset(), "a machine elsewhere"


def test_processes_that_may_not_be_seen_are_not_taken_for_none(monkeypatch):
    def forbidden(kind):
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", forbidden)
    assert listeners("http://127.0.0.1:80") is None


def _metrics(*workers: str, restarts: int = 0, usable: int = 2):
    return parse_metrics(_text(*workers, restarts=restarts, usable=usable))


def _text(*workers: str, restarts: int = 0, usable: int = 2) -> str:
    lines = ["# TYPE ridgeline_running gauge"]
    lines += [f'ridgeline_running{{pool="decode",worker="{worker}"}} 0' for worker in workers]
    lines += ["# TYPE ridgeline_workers gauge", f'ridgeline_workers{{pool="decode"}} {usable}']
    if restarts:
        labels = 'pool="decode",worker="1",reason="engine_died"'
        lines += [
            "# TYPE ridgeline_worker_restarts_total counter",
            f"ridgeline_worker_restarts_total{{{labels}}} {restarts}",
        ]
    lines += ["# TYPE ridgeline_steps_total counter"]
    lines += [f'ridgeline_steps_total{{pool="decode",worker="0",step="{step}"}} 3' for step in ("decode", "mixed")]
    return "\n".join(lines) + "\n"


def test_a_fleet_that_changed_is_noticed_even_where_counters_only_grow():
    assert fleet_change(_metrics("0", "1"), _metrics("0", "1")) is None
    assert fleet_change(_metrics("0", "1"), _metrics("0")) == "1 (decode) left during the round"
    assert fleet_change(_metrics("0", "1"), _metrics("0", "1", restarts=1)) == "1 was restarted during the round"
    assert fleet_change(_metrics("0", "1", restarts=1), _metrics("0", "1", restarts=1)) is None
    assert fleet_change(_metrics("0", "1"), _metrics("0", "1", usable=1)) == (
        "the pool decode changed its size during the round"
    )


def test_a_pool_that_a_worker_was_in_before_is_none_of_its_workers_now():
    before = 'ridgeline_steps_total{pool="colocated",worker="0",step="mixed"} 9'
    switched = parse_metrics(_text("0", "1") + before + "\n")
    assert workers_of(switched) == {("decode", "0"), ("decode", "1")}
    assert steps_by_worker(switched) == {("decode", "0"): 6, ("decode", "1"): 0}


def test_a_worker_that_has_made_no_step_has_none():
    assert steps_by_worker(_metrics("0", "1")) == {("decode", "0"): 6, ("decode", "1"): 0}
