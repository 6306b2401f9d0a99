"""One router with engines of known times, in a process of its own, for all tests that ask for its `url`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="package")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of `timed_router`."""
    from tests.support.served_router import make_model  # imports vLLM

    model = tmp_path_factory.mktemp("model")
    make_model(model)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.replay.timed_router", str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield next(line.split()[1] for line in process.stdout if line.startswith("url "))
        finally:
            process.stdin.close()
