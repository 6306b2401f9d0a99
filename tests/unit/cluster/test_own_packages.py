"""A module of somebody else that stands before one of ours is named, with what to do."""

import os
import subprocess
import sys

import pytest

from tests.support.patience import PATIENCE_S


@pytest.mark.parametrize("name", ["router", "engine", "contracts"])
def test_a_module_of_the_same_name_on_the_search_path_is_named_with_the_fix(tmp_path, name):
    (tmp_path / f"{name}.py").touch()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.getcwd()))}
    command = [sys.executable, "-P", "-c", "import cluster.cli"]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    last = ran.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {tmp_path / name}.py stands before Ridgeline's own package {name}")
    assert last.endswith("take its folder out of PYTHONPATH, or give it another name")
