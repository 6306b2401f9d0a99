"""A tiny proof on one CUDA GPU, with torch, numpy and msgspec: are the bits right, how fast do they move?

usage: python -m tools.gpu.check [--dry-run] [--out runs/gpu-check.json] [--only blocks,ipc]

Run it from the repository root on any machine with CUDA; it takes a few minutes and about 12 GB of the GPU's memory.
With --dry-run the same code runs on small host tensors, and its figures mean nothing. Exits 0 if all checks hold, 1 if
one does not, 77 if there is no CUDA device, in which case nothing was checked.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from tools.gpu import blocks, ipc, peaks
from tools.gpu.machine import Machine
from tools.gpu.result import Row, table

NO_CUDA = 77
SECTIONS = ("blocks", "ipc", "speeds")
"""What `--only` chooses from; peaks are always measured, since the others are compared with them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections, print their rows, write them down, and return the exit status."""
    asked = _parser().parse_args(arguments)
    if not asked.dry_run and not torch.cuda.is_available():
        sys.stdout.write("no CUDA device: nothing was checked (--dry-run does what it can on host tensors)\n")
        return NO_CUDA
    machine = Machine(torch.device("cpu") if asked.dry_run else torch.device("cuda", 0), asked.dry_run)
    began_s = time.monotonic()
    rows = run(machine, asked.only.split(",") if asked.only else SECTIONS)
    failed = [row.what for row in rows if row.ok is False]
    sys.stdout.write(table(rows) + "\n\n" + (f"FAILED: {', '.join(failed)}\n" if failed else "all checks hold\n"))
    if asked.dry_run:
        sys.stdout.write("a dry run on host tensors: no figure above says anything about a GPU\n")
    summary = {
        "device": machine.name,
        "memory_bytes": machine.memory_bytes,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "dry_run": asked.dry_run,
        "took_s": round(time.monotonic() - began_s, 1),
        "failed": failed,
        "rows": [asdict(row) for row in rows],
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(f"{asked.out}\n")
    return 1 if failed else 0


def run(machine: Machine, sections: Iterable[str]) -> list[Row]:
    """Return the rows of these sections; one that breaks is a row that says how, and the others go on."""
    torch.manual_seed(0)
    rows, copies = peaks.measure(machine)
    work: dict[str, Callable[[], Iterable[Row]]] = {
        "blocks": lambda: blocks.check(machine),
        "ipc": lambda: ipc.check(machine, copies),
        "speeds": lambda: blocks.speeds(machine, copies),
    }
    for section in sections:
        rows += _guarded(section, work[section])
    return rows


def _guarded(section: str, work: Callable[[], Iterable[Row]]) -> list[Row]:
    rows: list[Row] = []
    try:
        rows.extend(work())
    except Exception as error:  # noqa: BLE001  a GPU at hand is rare: one section must not cost the others
        rows.append(Row(section, "broke", note=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", ok=False))
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="small host tensors instead of a GPU")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check.json"), help="where the rows are written")
    parser.add_argument("--only", help=f"some of {','.join(SECTIONS)}")
    return parser


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # torch 2.11 aborted while Python ended, on an H200: the status says what was checked
