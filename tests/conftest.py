"""Which number format and instruction set this run is about: told at its start, and what `--dtype` changes.

Figures that tests measure, told at its end.

And no garbage is looked for while tests are collected: that imports vLLM and torch, a million objects that stay, and a
fifth of its time went into looking through them.
"""

from __future__ import annotations

import gc
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.doctor.checks import resolve_dtype
from ridgeline.cluster.doctor.facts import read_cpu_flags

INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16")
"""Flags of the CPU on which vLLM's kernels, and so the rounding of every logit, depend."""

for _name in ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy", "grpc_proxy"):  # tests ask this machine only
    os.environ.pop(_name, None)
    os.environ.pop(_name.upper(), None)
gc.disable()


def pytest_collection_finish() -> None:
    """What is here by now stays, and is never looked through again."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for Ray, whose sockets' paths must not be longer than 107 characters."""
    with tempfile.TemporaryDirectory(prefix="rl-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="number format of the shared deployment in tests/engines; auto: what the model.dtype of that name picks",
    )


def pytest_report_header(config: pytest.Config) -> str:
    flags = read_cpu_flags()
    found = ", ".join(name for name in INSTRUCTION_SETS if name in flags) or "none of those that kernels differ by"
    auto, asked = resolve_dtype(RidgelineConfig()), config.getoption("--dtype")
    return f"instruction sets: {found}; dtype auto is {auto}; engines run in {auto if asked == 'auto' else asked}"


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command that runs in a test takes over how its process logs."""
    handlers, level = logging.root.handlers[:], logging.getLogger("ridgeline").level
    yield
    logging.root.handlers[:] = handlers
    logging.getLogger("ridgeline").setLevel(level)


FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Tells a measured figure; all of them are printed at the end of the run, of tests that pass as well."""
    figures = request.config.stash.setdefault(FIGURES, [])
    return lambda sentence: figures.append(f"{request.node.name}\n    {sentence}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for sentence in config.stash.get(FIGURES, []):
        terminalreporter.write_line(sentence)
