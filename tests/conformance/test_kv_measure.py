"""Measuring hand-offs: real processes with a small cache, and what is refused before any process starts."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from ridgeline.kv_transfer import measure as measure_module
from ridgeline.kv_transfer.measure import (
    MEASURABLE,
    CacheShape,
    MeasureError,
    MeasureReport,
    MeasureSettings,
    SourceProcess,
    TransferFigures,
    measure,
)
from ridgeline.kv_transfer.names import TRANSPORT_NAMES
from ridgeline.roofline.process_cores import usable_cores
from tests.support.patience import PATIENCE_S, in_the_end

SMALL = CacheShape(num_layers=2, num_blocks=32, block_bytes=24 << 10)
PLENTY = 1 << 40


@pytest.fixture(scope="module")
def report() -> MeasureReport:
    told = []
    before = os.sched_getaffinity(0)
    settings = MeasureSettings(tokens=500, layers=2, rounds=3, transports=("grpc", "shm"))
    assert settings.problems(PLENTY) == []
    found = measure(settings, told.append)
    assert os.sched_getaffinity(0) == before
    assert told[0] == "starting the source process"
    assert told[-1] == "round 3 of 3"
    return found


def test_every_transport_is_measured_and_memcpy_last(report):
    assert [row.transport for row in report.figures] == ["shm", "grpc", "memcpy"]
    assert report.refused == {}
    cores = usable_cores()[:2]
    assert report.cores == (tuple(cores) if len(cores) == 2 else ())


def test_every_round_of_a_row_is_kept_and_means_something(report):
    for row in report.figures:
        assert row.num_bytes == 16 * 2 * (24 << 10)  # 500 tokens are 16 blocks
        assert len(row.latency_s) == len(row.cpu_s) == 3
        assert min(row.latency_s) * 1e3 <= row.median_ms <= row.p90_ms <= max(row.latency_s) * 1e3
        assert row.gb_s == pytest.approx(row.num_bytes / row.median_ms / 1e6)
        assert min(row.cpu_s) > 0


def test_figures_come_from_the_rounds():
    row = TransferFigures("grpc", 10_000_000, [0.01, 0.03, 0.02], [0.02, 0.01, 0.03])
    assert (row.median_ms, row.gb_s) == (pytest.approx(20), pytest.approx(0.5))
    assert row.p90_ms == pytest.approx(28)
    assert row.cpu_s_per_gb == pytest.approx(2)


def test_the_list_of_transports_is_the_projects_own():
    assert set(MEASURABLE) == set(TRANSPORT_NAMES) - {"auto", "cuda-ipc"}
    assert MeasureSettings().num_blocks == 54
    assert MeasureSettings().num_bytes == 54 * 30 * (24 << 10)


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokens": 0}, "tokens must be 1 or more, not 0"),
        ({"layers": -1}, "layers must be 1 or more, not -1"),
        ({"block_bytes": 0}, "block-bytes must be 1 or more, not 0"),
        ({"rounds": 2}, "rounds must be 3 or more, not 2"),
        ({"transports": ("tcp",)}, "transport 'tcp' cannot be measured: give one or more of "),
        (
            {"tokens": 32, "layers": 2},
            "is too small for shared memory, which takes at least 1048576 bytes: raise tokens to",
        ),
        ({"tokens": 10_000_000}, "lower tokens or layers, or free memory"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_its_fix(changes, sentence):
    problems = MeasureSettings(**changes).problems(1 << 30)
    assert len(problems) == 1
    assert sentence in problems[0]


def test_the_number_of_tokens_that_shared_memory_is_said_to_need_is_enough():
    problem = MeasureSettings(tokens=1, layers=3, block_bytes=999).problems(PLENTY)[0]
    tokens = int(problem.partition("raise tokens to ")[2].split(",")[0])
    assert MeasureSettings(tokens=tokens, layers=3, block_bytes=999).problems(PLENTY) == []
    assert MeasureSettings(tokens=tokens - 32, layers=3, block_bytes=999).problems(PLENTY)


def test_a_small_cache_is_enough_for_a_transport_that_does_not_map_it():
    assert MeasureSettings(tokens=32, layers=2, transports=("grpc",)).problems(PLENTY) == []


# --- the child


@pytest.fixture
def source():
    with SourceProcess(SMALL, ("grpc",), None) as source:
        source.start()
        yield source


def test_a_source_that_was_closed_has_ended_and_may_be_closed_again(source):
    pid = source.pid
    assert psutil.pid_exists(pid)
    source.close()
    assert not psutil.pid_exists(pid)
    source.close()


def test_a_source_that_dies_is_an_error_and_not_a_hang(source):
    os.kill(source.pid, signal.SIGKILL)
    with pytest.raises(MeasureError, match=r"the source process ended \(exit status -9\)"):
        source.publish("grpc", "request", [1, 2])


def test_a_source_that_dies_before_it_is_fetched_from_is_an_error_and_not_a_hang(monkeypatch):
    monkeypatch.setattr(measure_module, "FETCH_DEADLINE_S", 0.5)
    publish = SourceProcess.publish

    def publish_and_die(source, *what):
        published = publish(source, *what)
        os.kill(source.pid, signal.SIGKILL)
        return published

    monkeypatch.setattr(SourceProcess, "publish", publish_and_die)
    with pytest.raises(MeasureError, match=r"a hand-off over grpc failed \((unreachable|timeout)\)"):
        measure(MeasureSettings(tokens=32, layers=2, rounds=3, transports=("grpc",)))


PARENT = """
import time
from ridgeline.kv_transfer.measure import CacheShape, SourceProcess
if __name__ == "__main__":
    source = SourceProcess(CacheShape(2, 32, 24576), ("grpc",), None)
    source._process.start()
    print(source.pid, flush=True)
    {then}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "then", ["time.sleep(60)", "source._answer(60); print('up', flush=True); time.sleep(60)", "raise SystemError"]
)
def test_the_source_never_outlives_its_parent(tmp_path, then):
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(then=then), encoding="utf-8")
    parent = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=_with_this_folder()
    )
    try:
        pid = int(parent.stdout.readline())
        if "up" in then:
            assert parent.stdout.readline() == "up\n"
    finally:
        parent.kill()  # unless it has ended by itself
        parent.wait(PATIENCE_S)
        parent.stdout.close()
    with suppress(psutil.NoSuchProcess):  # collected by now, perhaps between two questions
        in_the_end(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _with_this_folder():
    return {**os.environ, "PYTHONPATH": os.getcwd()}
