"""What holds for the tests of all transports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.patience import PATIENCE_S


@pytest.fixture(scope="session", autouse=True)
def patient_peers() -> Iterator[None]:
    """Both ends are one process, or wait for each other: one that stands still for seconds must lose nobody by that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ridgeline.kv_transfer.control.CONTROL_DEADLINE_S", PATIENCE_S)
        patch.setattr("ridgeline.kv_transfer.collective.group.FORM_S", PATIENCE_S)
        patch.setattr("ridgeline.kv_transfer.collective.puller.STALLED_S", PATIENCE_S)
        patch.setattr("ridgeline.kv_transfer.nixl.puller.STALLED_S", PATIENCE_S)
        yield
