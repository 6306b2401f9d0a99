"""Folders of a user, named by the shell, below the home or missing, and those in which Unix sockets fit."""

import os
import pwd
import socket
import tempfile
from pathlib import Path

import pytest

from ridgeline.cluster import folders
from ridgeline.cluster.deployments.names import running
from ridgeline.cluster.folders import (
    LONGEST_BELOW,
    SOCKET_PATH_BYTES,
    NoHome,
    cache_folder,
    own_folder,
    ray_folder,
    remove_ended_sessions,
    session_kept,
    state_folder,
    why_unwritable,
)
from ridgeline.cluster.model_store import ModelError, model_state

FOLDERS = [(state_folder, "XDG_STATE_HOME", ".local/state"), (cache_folder, "XDG_CACHE_HOME", ".cache")]


@pytest.fixture
def no_entry(monkeypatch):
    """This user is not in the list of users."""

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME")


@pytest.mark.parametrize(("folder", "variable", "below"), FOLDERS)
def test_the_variable_counts_then_the_home_and_without_both_the_fix_is_told(
    folder, variable, below, monkeypatch, no_entry
):
    monkeypatch.setenv(variable, "/elsewhere")
    assert folder() == Path("/elsewhere/ridgeline")
    for unset in (lambda: monkeypatch.setenv(variable, ""), lambda: monkeypatch.delenv(variable)):
        unset()
        with pytest.raises(NoHome, match="set HOME"):
            folder()
    monkeypatch.setenv("HOME", "/home/me")
    assert folder() == Path("/home/me", below, "ridgeline")


def test_a_folder_that_is_not_there_yet_can_be_written_where_the_nearest_above_it_can(tmp_path):
    assert why_unwritable(tmp_path / "not" / "there") == ""
    (tmp_path / "file").write_text("")
    assert why_unwritable(tmp_path / "file" / "below") == "Not a directory"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"], "nothing is left of the trial"
    assert why_unwritable(Path("/proc/none")), "also root is told"


@pytest.fixture
def a_user():
    """Who runs this, or another one where root does, whom no folder is closed to."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(54_321)
    yield
    if is_root:
        os.seteuid(0)


def test_a_home_that_may_not_be_entered_is_told_and_has_no_deployments(tmp_path, monkeypatch, a_user):
    for _, variable, _ in FOLDERS:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", "/proc/1/root/below")  # another user's process
    assert why_unwritable(cache_folder())
    assert running() == {}
    with pytest.raises(ModelError, match="set XDG_CACHE_HOME"):
        model_state("smollm2-135m")


def test_a_short_folder_is_taken_as_the_shell_names_it(tmp_path, monkeypatch):
    folder = tempfile.mkdtemp(dir="/tmp")
    assert ray_folder({"TMPDIR": folder}).path == folder
    assert ray_folder({"TMPDIR": "/nowhere", "RAY_TMPDIR": folder}).variable == "RAY_TMPDIR"
    assert ray_folder({"TMPDIR": folder}).logs == f"{folder}/ray/session_latest/logs"
    os.rmdir(folder)


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_one_in_which_no_socket_fits_is_replaced(variable, tmp_path):
    longest = "/" + "x" * (SOCKET_PATH_BYTES - len(LONGEST_BELOW))
    folder = ray_folder({variable: longest})
    assert (folder.path, folder.asked, folder.problem) == ("/tmp", longest, "")


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_one_that_cannot_be_written_or_in_which_something_stands_is_told_with_the_variable_to_set(variable):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder, "ray").touch()
        for path in (folder, f"{folder}/ray"):
            assert f"set {variable}" in ray_folder({variable: path}).problem


def test_of_the_sessions_of_rays_those_of_ours_are_removed_that_have_ended(tmp_path):
    kept, ended, another = (tmp_path / f"session_{name}" for name in ("kept", "ended", "another"))
    for session in (kept, ended, another):
        (session / "logs").mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to(kept)
    with session_kept(kept):
        with session_kept(ended):
            remove_ended_sessions(tmp_path)
            assert ended.exists()
        remove_ended_sessions(tmp_path)
        assert sorted(tmp_path.glob("session_*")) == [another, kept, tmp_path / "session_latest"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        remove_ended_sessions(tmp_path)
    assert kept.exists(), "it is another user's"
    remove_ended_sessions(tmp_path)
    assert (kept.exists(), another.exists()) == (False, True)


def test_the_longest_socket_of_ours_fits_into_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 90)))
    folder = own_folder()
    path = folder / folders.LONGEST_OF_OURS.rpartition("/")[2]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    path.unlink()
    folder.rmdir()
    assert folder.parent.as_posix() == "/tmp"
