"""What holds for all tests of components."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.patience import PATIENCE_S


@pytest.fixture(scope="package", autouse=True)
def patient_questions() -> Iterator[None]:
    """Router, workers and sources are one process here: one that stands still for 2 s must lose nobody by that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ridgeline.worker_runtime.client.STATUS_DEADLINE_S", PATIENCE_S)
        patch.setattr("ridgeline.kv_transfer.control.CONTROL_DEADLINE_S", PATIENCE_S)
        yield
