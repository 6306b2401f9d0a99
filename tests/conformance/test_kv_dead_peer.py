"""The source is another process, killed or frozen in the middle of a fetch: every fetch ends, and soon."""

import os
import signal
import time

import pytest

from kv_transfer import errors
from kv_transfer.measure_source import Cache, CacheShape, SourceProcess

SHAPE = CacheShape(num_layers=24, num_blocks=64, block_bytes=128 << 10)
BLOCKS = list(range(SHAPE.num_blocks))
DEADLINE_S = 4.0
TRANSPORTS = ["grpc", "shm", "collective"]


@pytest.fixture(params=TRANSPORTS)
def peers(request):
    """(source process, our service, transport); 200 MB in the source, so that a fetch takes a while."""
    cache = Cache(SHAPE)
    with SourceProcess(SHAPE, [request.param], core=None) as source:
        source.start()
        service = cache.service(request.param, fetch_deadline_s=DEADLINE_S)
        service.start()
        try:
            yield source, service, request.param
        finally:
            os.kill(source.pid, signal.SIGCONT)
            service.close()


def receipt_of(service, request_id, within_s):
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        service.wait(0.5)
        completed = service.poll()
        if request_id in completed.receipts:
            return completed.receipts[request_id]
    raise AssertionError(f"no completion within {within_s} s")


def begin(source, service, transport, request_id):
    handoff, _ = source.publish(transport, f"{request_id}-source", BLOCKS)
    service.start_fetch(request_id, handoff, 0, BLOCKS)


def test_a_source_killed_in_mid_fetch_is_unreachable_at_once_unless_its_memory_is_mapped(peers):
    source, service, transport = peers
    begin(source, service, transport, "warm")
    assert receipt_of(service, "warm", 10).outcome == "ok"
    begin(source, service, transport, "cut")
    time.sleep(0.01)
    os.kill(source.pid, signal.SIGKILL)
    receipt = receipt_of(service, "cut", 3)
    if receipt.outcome != "ok":
        assert receipt.reason == errors.UNREACHABLE, receipt
    else:
        assert transport == "shm", "what was mapped outlives its owner"
        assert receipt.num_bytes == SHAPE.handoff_bytes(SHAPE.num_blocks)


def test_a_source_frozen_in_mid_fetch_is_a_timeout_and_serves_again_when_it_goes_on(peers):
    source, service, transport = peers
    begin(source, service, transport, "warm")
    assert receipt_of(service, "warm", 10).outcome == "ok"
    handoff, _ = source.publish(transport, "frozen-source", BLOCKS)
    os.kill(source.pid, signal.SIGSTOP)
    service.start_fetch("frozen", handoff, 0, BLOCKS)
    receipt = receipt_of(service, "frozen", DEADLINE_S + 3)
    assert (receipt.outcome, receipt.reason) == ("failed", errors.TIMEOUT), receipt
    os.kill(source.pid, signal.SIGCONT)
    begin(source, service, transport, "again")
    assert receipt_of(service, "again", DEADLINE_S + 3).outcome == "ok"
    assert service.stats().active_fetches == 0
