"""Fetches of a `TransferService` from a source in another process."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ridgeline.contracts.handoff import TransferResult
from ridgeline.kv_transfer.measure import SourceProcess
from ridgeline.kv_transfer.service import TransferService
from tests.support.patience import PATIENCE_S


def begin(
    source: SourceProcess, service: TransferService, transport: str, request_id: str, blocks: Sequence[int]
) -> None:
    """Publish these blocks and start to fetch them to the same places."""
    handoff, _ = source.publish(transport, f"{request_id}-source", list(blocks))
    service.start_fetch(request_id, handoff, {0: blocks})


def result_of(service: TransferService, request_id: str) -> TransferResult:
    """Wait for the end of a fetch."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        service.wait(0.5)
        completed = service.poll()
        if request_id in completed.results:
            return completed.results[request_id]
    raise AssertionError("no completion")
