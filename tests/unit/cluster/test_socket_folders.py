"""Folders in which Unix sockets fit, however long the path is that the shell names."""

import os
import socket
import tempfile
from pathlib import Path

import pytest

from ridgeline.cluster import socket_folders
from ridgeline.cluster.socket_folders import (
    LONGEST_BELOW,
    SOCKET_PATH_BYTES,
    own_folder,
    ray_folder,
    remove_ended_sessions,
    session_kept,
)


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
    path = folder / socket_folders.LONGEST_OF_OURS.rpartition("/")[2]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    path.unlink()
    folder.rmdir()
    assert folder.parent.as_posix() == "/tmp"
