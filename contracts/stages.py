"""Notes when a request passes a stage, so that `tools.bench.stages` can show where the time of one request goes.

Off, at the price of one look at a variable, unless RIDGELINE_STAGES names a file when a process starts. Every process
of the deployment then appends lines to it. They hold the monotonic clock, which the processes of one machine share;
nothing says whose request it is, so there should be one at a time.
"""

from __future__ import annotations

import os
import time
from functools import cache
from typing import Final, Literal

FILE_VARIABLE: Final = "RIDGELINE_STAGES"
Stage = Literal[
    "router has prompt",
    "prefill worker has it",
    "prefill engine has it",
    "scheduled",
    "announcement at router",
    "decode worker has it",
    "decode engine has it",
    "fetch issued",
    "fetch asked",
    "step ended",
    "published",
    "last bytes in place",
    "fetch ended",
    "decode engine knows",
    "token leaves worker",
    "token at router",
]


def mark(stage: Stage) -> None:
    """Note that some request has passed this stage now."""
    if (file := _file()) is not None:
        os.write(file, f"{time.monotonic_ns()} {stage}\n".encode())  # one call for each line: lines never mix


@cache
def _file() -> int | None:
    path = os.environ.get(FILE_VARIABLE)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) if path else None
