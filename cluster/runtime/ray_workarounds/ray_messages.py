"""What Ray itself has to say goes to a file; what its user must know is said by us, in one sentence.

Ray's driver prints whatever a node publishes as an error ("(raylet) A worker died or was killed ..."), whatever
`log_to_driver` is, also for processes that we end on purpose.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray._private import worker as ray_worker

_NOTICES = (
    "Token authentication is enabled for this Ray cluster",
    "Triton is installed, but doesn't include CPU backend",
)
"""What Ray, and vLLM when it is imported on a CPU, write at every start, and nobody needs."""


@contextmanager
def ray_messages_in_a_file() -> Iterator[Path]:
    """Redirect Ray's messages to a file while the block runs; it is deleted if it says nothing at the end."""
    handle, name = tempfile.mkstemp(prefix="ridgeline-ray-", suffix=".log")
    os.close(handle)
    log_file = Path(name)
    ray_logger, to_file = logging.getLogger("ray"), logging.FileHandler(log_file)
    former_handlers, former_print = ray_logger.handlers[:], ray_worker.print_to_stdstream

    def write(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        """Called by Ray's listening thread for each message."""
        for line in data["lines"]:
            ray_logger.error("(%s) %s", data["pid"], line)

    ray_logger.handlers[:] = [to_file]
    ray_worker.print_to_stdstream = write
    try:
        yield log_file
    finally:
        ray_worker.print_to_stdstream = former_print
        ray_logger.handlers[:] = former_handlers
        to_file.close()
        with log_file.open(encoding="utf-8", errors="replace") as lines:
            said = [line for line in lines if not any(notice in line for notice in _NOTICES)]
        if not said:
            log_file.unlink()
