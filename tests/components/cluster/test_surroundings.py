"""The command where people start it: without a home, in another locale, in a small container, by `uv run`, in a job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.engines.serve_process import REPOSITORY, RIDGELINE
from tests.support.patience import PATIENCE_S

HOME_VARIABLES = ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")
CPU_GROUPS = next((path for path in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")) if path.is_dir()), None)
OF_A_JOB = {
    "RAY_ADDRESS": "127.0.0.1:9",
    "RAY_AUTH_MODE": "disabled",
    "RAY_JOB_CONFIG_JSON_ENV_VAR": "no JSON",
    "RAY_RUNTIME_ENV_HOOK": "no.such.hook",
}

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may bind files and make control groups")


def run(*command: str, variables: Mapping[str, str] = {}, **options) -> subprocess.CompletedProcess[str]:
    shell = {name: value for name, value in os.environ.items() if name not in HOME_VARIABLES}
    return subprocess.run(
        command,
        env=shell | variables,
        cwd=REPOSITORY,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
        timeout=PATIENCE_S,
        **options,
    )


@as_root
@pytest.mark.parametrize("command", ["status", "doctor", "model"])
def test_a_user_without_any_home_is_told_what_to_set(command):
    no_users = "mount --bind /dev/null /etc/passwd && mount --bind /dev/null /etc/nsswitch.conf"
    apart = ("unshare", "--mount", "sh", "-c", f'{no_users} && exec "$@"', "sh")
    if (tried := run(*apart, "true")).returncode:
        pytest.skip(f"no list of users of its own can be made here: {tried.stderr}")
    told = run(*apart, str(RIDGELINE), command)
    assert told.returncode == 1
    assert told.stderr == "error: this user has no home: set HOME to a folder that can be written\n"


def test_a_home_that_cannot_be_written_is_named_with_what_to_set_instead():
    found = run(str(RIDGELINE), "doctor", variables={"HOME": "/proc/none"})
    assert found.returncode == 1
    for variable in HOME_VARIABLES:
        assert f"set {variable} to a folder that can be" in " ".join(found.stdout.split())
    assert "The model cannot be written to" in found.stdout
    assert run(str(RIDGELINE), "status", variables={"HOME": "/proc/none"}).returncode == 0


def test_a_report_can_be_printed_in_a_locale_without_its_signs(tmp_path):
    variables = {"HOME": str(tmp_path), "LC_ALL": "C", "PYTHONUTF8": "0"}
    found = run(str(RIDGELINE), "doctor", variables=variables)
    assert "cores" in found.stdout
    assert found.stderr == ""


@pytest.fixture
def half_a_core() -> Iterator[Callable[[], None]]:
    """What puts a process into a control group of its own, which may use half the time of one core."""
    if CPU_GROUPS is None:
        pytest.skip("there are no control groups here")
    group = CPU_GROUPS / f"half-a-core-{os.getpid()}"
    first_version = CPU_GROUPS.name == "cpu"
    file, text = ("cpu.cfs_quota_us", "50000") if first_version else ("cpu.max", "50000 100000")
    try:
        group.mkdir()
        (group / file).write_text(text)
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no control group with a CPU quota can be made here: {error}")
    yield lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None
    group.rmdir()


@as_root
def test_cores_that_the_container_has_no_time_for_are_not_usable(half_a_core, tmp_path):
    found = run(str(RIDGELINE), "doctor", variables={"HOME": str(tmp_path)}, preexec_fn=half_a_core)
    assert "2 needed, 0 usable" in found.stdout
    assert found.returncode == 1


@pytest.mark.slow
def test_a_ray_of_our_own_starts_anywhere_asks_for_its_token_and_takes_away_what_the_last_one_left():
    uv = shutil.which("uv", path=f"{RIDGELINE.parent}:{os.environ['PATH']}")
    if uv is None:
        pytest.skip("uv is not installed")
    started = (sys.executable, "-m", "tests.support.own_ray")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        for program, home in (((uv, "run", "--no-sync", *started), "/proc/none"), (started, folder)):
            looked = run(*program, variables={**OF_A_JOB, "HOME": home, "TMPDIR": folder, "UV_CACHE_DIR": folder})
            assert looked.returncode == 0, looked.stderr
            seen = json.loads(looked.stdout.splitlines()[-1])
            assert seen["actor"] == "127.0.0.1"
            assert seen["stranger"].startswith("ray.exceptions.AuthenticationError")
            line, library = seen["log"].splitlines()
            assert line.endswith(' info worker-0 ridgeline.worker_runtime.host: begins worker="worker-0"')
            assert library == "a library says"
        sessions = [path for path in Path(folder, "ray").glob("session_*") if not path.is_symlink()]
        assert [path.name for path in sessions] == [seen["session"]]
        assert not Path(folder, ".ray").exists()
