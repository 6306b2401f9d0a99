"""What holds for all unit tests: no vLLM, and patience with a machine that stands still."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.support.patience import PATIENCE_S


@pytest.fixture(scope="session", autouse=True)
def patient_questions() -> Iterator[None]:
    """Client and source are one process here: one that stands still for 2 s must lose nobody by that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ridgeline.kv_transfer.control.CONTROL_DEADLINE_S", PATIENCE_S)
        yield


@pytest.fixture(scope="package", autouse=True)
def no_engine() -> Iterator[None]:
    """Keep these tests quick: importing vLLM takes ten seconds, and what needs it is in tests/components."""
    others_import_it = "vllm" in sys.modules  # tests of components, collected with these
    yield
    assert others_import_it or "vllm" not in sys.modules, "a unit test imports vLLM: it belongs to tests/components"
