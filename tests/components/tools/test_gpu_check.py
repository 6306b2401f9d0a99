"""The check for a CUDA machine, as far as host tensors carry it: a GPU at hand is rare, and a typo must not cost it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ridgeline.kv_transfer.memory.blocks import BlockPool
from tools.gpu import blocks, check
from tools.gpu.machine import Machine
from tools.gpu.result import Row, table

REPOSITORY = Path(__file__).parents[3]
DRY = Machine(torch.device("cpu"), dry=True)
NOT_THERE = ("vllm", "ray", "xxhash", "grpc", "pydantic", "rich", "psutil", "yaml")
"""What a machine with torch, numpy and msgspec alone does not have."""


@pytest.mark.slow
def test_a_dry_run_goes_through_every_section_where_there_is_little_but_torch(tmp_path):
    out = tmp_path / "new" / "rows.json"
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({NOT_THERE!r}))\n"
        f"from tools.gpu.check import main\n"
        f"sys.exit(main(['--dry-run', '--out', {str(out)!r}]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "all checks hold" in ran.stdout
    assert "no figure above says anything about a GPU" in ran.stdout
    summary = json.loads(out.read_text())
    assert (summary["device"], summary["dry_run"], summary["failed"]) == ("host tensors", True, [])
    held = {row["what"] for row in summary["rows"] if row["ok"]}
    assert held >= {shape.name for shape in blocks.SHAPES}
    assert len({row["section"] for row in summary["rows"]}) == 1 + len(check.SECTIONS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, which this would measure")
def test_without_a_device_nothing_is_checked_and_the_status_says_so(tmp_path, capsys):
    assert check.main(["--out", str(tmp_path / "rows.json")]) == check.NO_CUDA
    assert "nothing was checked" in capsys.readouterr().out
    assert not (tmp_path / "rows.json").exists()


def test_a_wrong_byte_is_found_and_named(monkeypatch):
    right = BlockPool.gather

    def wrong(pool, layers, ids):
        copied = right(pool, layers, ids)
        copied[0, 0, 0] ^= 1
        return copied

    monkeypatch.setattr(BlockPool, "gather", wrong)
    assert blocks.problems(DRY, blocks.SHAPES[-1], 8) == [
        "gather of layer 0", "gather of layer 1", "write of layer 1", "gather of layer 2",
        "gather of all layers", "write of all layers",
    ]  # fmt: skip


def test_a_section_that_breaks_fails_and_the_others_go_on(monkeypatch, tmp_path):
    def broken(*_):
        raise RuntimeError("CUDA error: out of luck\nmore")

    monkeypatch.setattr(check.ipc, "check", broken)
    out = tmp_path / "rows.json"
    assert check.main(["--dry-run", "--only", "ipc,speeds", "--out", str(out)]) == 1
    summary = json.loads(out.read_text())
    assert summary["failed"] == ["broke"]
    assert any("gathered" in row["what"] for row in summary["rows"])


def test_the_table_marks_what_holds_what_does_not_and_what_is_measured():
    text = table([Row("a", "one", ok=True), Row("a", "two", ok=False, note="why"), Row("b", "three", 1234.5, "GB/s")])
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines == ["", "a", "✓ one", "✗ two why", "", "b", "three 1,234 GB/s"]
