"""The source is another process, killed or frozen in the middle of a fetch: every fetch ends, and soon."""

import contextlib
import os
import signal
import time
from dataclasses import replace

import pytest

from ridgeline.contracts import errors
from ridgeline.kv_transfer.measure import Cache, CacheShape, SourceProcess
from tests.support.cuda import NEEDS_CUDA
from tests.support.fetches import begin, result_of
from tests.support.nixl import needs_nixl
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow

SHAPE = CacheShape(num_layers=24, num_blocks=64, block_bytes=128 << 10)
BLOCKS = list(range(SHAPE.num_blocks))
DEADLINE_S = 4.0
"""Of the one fetch that is to end by it."""
OVER_TCP = "nixl over tcp"
ON_GPU = "cuda-ipc on a GPU"
MAPPED = ("shm", "cuda-ipc")
"""What they have mapped outlives its owner."""
ATTEMPTS = 4
"""Each with a new source: a fetch may end before the thread that is to kill its source runs again."""
TRANSPORTS = ["grpc", "shm", "collective", pytest.param(ON_GPU, marks=NEEDS_CUDA)]
"""In host memory `cuda-ipc` is as `shm` here; `test_kv_nixl` freezes a source of `nixl`."""
KILLED = [*TRANSPORTS, *(pytest.param(name, marks=needs_nixl) for name in ("nixl", OVER_TCP))]


@pytest.fixture
def peers(request, monkeypatch):
    """(what starts a source process, our service, transport); 200 MB in the source, so that a fetch takes a while."""
    if request.param == OVER_TCP:
        monkeypatch.setenv("UCX_TLS", "tcp")
    transport = request.param.split()[0]
    shape = replace(SHAPE, device="cuda:0" if request.param == ON_GPU else "cpu")
    cache = Cache(shape)
    with contextlib.ExitStack() as stack:
        sources = []

        def new_source():
            sources.append(stack.enter_context(SourceProcess(shape, [transport], core=None)))
            sources[-1].start()
            return sources[-1]

        service = cache.service(transport, kv_fetch_timeout_s=2 * PATIENCE_S)
        service.start()
        try:
            yield new_source, service, transport
        finally:
            os.kill(sources[-1].pid, signal.SIGCONT)
            service.close()


@pytest.mark.parametrize("peers", KILLED, indirect=True)
def test_a_source_killed_in_mid_fetch_is_unreachable_at_once_unless_its_memory_is_mapped(peers):
    new_source, service, transport = peers
    for attempt in range(ATTEMPTS):
        source = new_source()
        begin(source, service, transport, f"warm-{attempt}", BLOCKS)
        assert result_of(service, f"warm-{attempt}").outcome == "ok"
        begin(source, service, transport, f"cut-{attempt}", BLOCKS)
        time.sleep(0.01)
        os.kill(source.pid, signal.SIGKILL)
        result = result_of(service, f"cut-{attempt}")
        if result.outcome != "ok" or transport in MAPPED:
            break
    if result.outcome != "ok":
        assert result.reason == errors.UNREACHABLE, result
    else:
        assert transport in MAPPED, f"none of {ATTEMPTS} fetches was cut"
        assert result.num_bytes == SHAPE.handoff_bytes(SHAPE.num_blocks)


@pytest.mark.parametrize("peers", TRANSPORTS, indirect=True)
def test_a_source_frozen_in_mid_fetch_is_a_timeout_and_serves_again_when_it_goes_on(peers):
    new_source, service, transport = peers
    source = new_source()
    begin(source, service, transport, "warm", BLOCKS)
    assert result_of(service, "warm").outcome == "ok"
    handoff, _ = source.publish(transport, "frozen-source", BLOCKS)
    os.kill(source.pid, signal.SIGSTOP)
    fetcher = service._fetcher
    patient, fetcher._options = fetcher._options, replace(fetcher._options, kv_fetch_timeout_s=DEADLINE_S)
    service.start_fetch("frozen", handoff, {0: BLOCKS})
    result = result_of(service, "frozen")
    fetcher._options = patient
    assert (result.outcome, result.reason) == ("failed", errors.TIMEOUT), result
    os.kill(source.pid, signal.SIGCONT)
    begin(source, service, transport, "again", BLOCKS)
    assert result_of(service, "again").outcome == "ok"
    assert service.stats().active_fetches == 0
