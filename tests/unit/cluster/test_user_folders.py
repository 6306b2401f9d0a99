"""The folders of a user: named by the shell, below the home, or missing."""

import os
import pwd
from pathlib import Path

import pytest

from ridgeline.cluster.deployments.names import running
from ridgeline.cluster.model_store import ModelError, model_state
from ridgeline.cluster.user_folders import NoHome, cache_folder, state_folder, why_unwritable

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
