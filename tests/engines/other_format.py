"""Runs what depends on exact tokens in float32 where `dtype: auto` is bfloat16; else says that there is no need.

usage: python -m tests.engines.other_format [pytest's arguments]

What a CPU with bfloat16 instructions runs by itself is not what one without them runs. The other way round is not
tried: a CPU without these instructions emulates bfloat16, which takes many times as long.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.doctor.checks import resolve_dtype

TOKEN_TESTS = ("test_tokens.py", "test_clients.py")
EXACT = "every_prompt and shm or only_at_ties or a_seed_with or test_clients"
"""Prompts of all lengths bit for bit, 16 at a time, a seed, and clients that compare two answers to one prompt."""


def main() -> int:
    """The tests' exit code."""
    auto = resolve_dtype(RidgelineConfig())
    if auto == "float32":
        print("dtype: this CPU has no bfloat16 instructions; everything was run in float32, and only in float32")  # noqa: T201
        return 0
    print(f"dtype: everything was run in {auto}; now the tests of tokens in float32", flush=True)  # noqa: T201
    tests = [str(Path(__file__).with_name(name)) for name in TOKEN_TESTS]
    command = [sys.executable, "-m", "pytest", "-v", "-m", "not long", "--dtype", "float32", "-k", EXACT, *tests]
    return subprocess.call([*command, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
