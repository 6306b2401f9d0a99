"""Why an engine could not load, or ended, in one sentence.

vLLM's front end knows only that a process has ended and says "See root cause above", above being a log that nobody
sees. Each process of an engine therefore leaves its own first error in a file, which the front end reads.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

MOST_CHARACTERS = 600
_POINTS_ELSEWHERE = re.compile(r"root cause|stack ?trace|(error|logs?|output|messages?) above", re.IGNORECASE)
_EXIT_CODES = re.compile(r"Failed core proc\(s\): \{[^}]*?: (-?\d+)")
_SIGNALS = {
    signal.SIGKILL: "as the kernel does when memory is short: see dmesg",
    signal.SIGILL: "an instruction that this machine does not allow",
    signal.SIGBUS: "as when /dev/shm is full",
}


def sentence_of(error: BaseException) -> str:
    """Return the error as one sentence: its own words, or those of its cause where it only points elsewhere."""
    seen: set[int] = set()
    while _POINTS_ELSEWHERE.search(str(error)) and id(error) not in seen:
        seen.add(id(error))
        error = error.__cause__ or error.__context__ or error
    return f"{type(error).__name__}: {_shortened(_words(error))}"


def _words(error: BaseException) -> str:
    errors = getattr(error, "errors", None)
    if callable(errors) and type(error).__name__ == "ValidationError":  # pydantic's own words show all that was given
        found = errors(include_url=False, include_input=False, include_context=False)
        return "; ".join(str(one["msg"]).removeprefix("Value error, ") for one in found)
    return str(error) or "no words"


def _shortened(text: str) -> str:
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS].rpartition(" ")[0] + " ..."


class CauseFile:
    """The file in which the processes of one engine leave why they cannot go on; the first one's word counts."""

    def __init__(self, folder: str, engine_id: str) -> None:
        self._path = Path(folder, f"root-cause-{engine_id}")

    def leave(self, error: BaseException) -> None:
        """Write it down, unless another process was first."""
        with suppress(FileExistsError), self._path.open("x", encoding="utf-8") as file:
            file.write(sentence_of(error))

    def read(self) -> str:
        """Return what was left; empty if nothing was."""
        try:
            return self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def why_not_loaded(self, error: BaseException) -> str:
        """Return why the engine could not load, from what its front end raised and its processes have left."""
        exited = _EXIT_CODES.search(str(error))
        ended = f"its process {how_ended(int(exited[1]))} while it loaded" if exited else ""
        return self.read() or ended or sentence_of(error)

    def why_ended(self, exit_code: int | None) -> str:
        """Return how the engine's process ended, and why if it has left that."""
        how = "its engine process " + ("reported a fatal error" if exit_code is None else how_ended(exit_code))
        return f"{how}: {cause}" if (cause := self.read()) else how

    def remove(self) -> None:
        """Remove it, if it is there."""
        self._path.unlink(missing_ok=True)


def how_ended(exit_code: int) -> str:
    """Say in words what a process's exit code means, as `multiprocessing` gives it."""
    if exit_code >= 0:
        return f"ended with status {exit_code}"
    try:
        number = signal.Signals(-exit_code)
    except ValueError:
        return f"was ended by signal {-exit_code}"
    why = _SIGNALS.get(number)
    return f"was ended by {number.name}" + (f" ({why})" if why else "")


def output_place() -> str:
    """Say in which file the output of this process and its engine is; empty if it goes to a terminal or a pipe."""
    path = os.readlink("/proc/self/fd/2")
    return f"; its output is in {path}" if os.path.isfile(path) else ""
