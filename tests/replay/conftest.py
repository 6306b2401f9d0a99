"""One router with engines of known times, in a process of its own, for all tests that ask for its `url`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline.loadtest.run import replay

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


@pytest.fixture
def plain_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have numbers instead of a tokenizer's ids."""
    monkeypatch.setattr(replay, "load_text_tokens", lambda _: tuple(range(5000)))
    monkeypatch.setattr("ridgeline.loadtest.run.server.is_at_hand", lambda _: True)
