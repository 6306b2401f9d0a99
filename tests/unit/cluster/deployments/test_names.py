"""Names of deployments on one machine: held by one process, free again however it ends."""

import os
import signal
import subprocess
import sys

import msgspec
import pytest

from ridgeline.cluster.deployments.names import AlreadyRunning, DeploymentFolder, NoFolder, running

HOLD = """
import sys
from ridgeline.cluster.deployments.names import DeploymentFolder
with DeploymentFolder("mine").held(detached=True) as held:
    held.tell(phase="ready", url="http://127.0.0.1:1")
    print("holds", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _a_home_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def holder():
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ.copy()
    ) as process:
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


def test_a_name_that_a_process_holds_is_refused_with_the_process_and_the_fix(holder):
    sentence = rf"'mine'.*process {holder.pid}.*ridgeline stop --name mine.*--name"
    with pytest.raises(AlreadyRunning, match=sentence), DeploymentFolder("mine").held():
        pass
    with DeploymentFolder("another").held():
        pass


def test_what_a_process_says_is_read_while_it_lives_and_not_after_it_was_killed(holder):
    state = DeploymentFolder("mine").state()
    assert (state.pid, state.phase, state.url, state.detached) == (holder.pid, "ready", "http://127.0.0.1:1", True)
    assert running() == {"mine": state}
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert DeploymentFolder("mine").folder.joinpath("state.json").exists(), "it had no time to remove it"
    assert DeploymentFolder("mine").state() is None
    assert running() == {}
    with DeploymentFolder("mine").held():
        pass


def test_each_phase_keeps_the_url_that_was_told_before_and_the_name_is_free_again_at_the_end():
    place = DeploymentFolder("mine")
    assert (running(), place.state()) == ({}, None)
    for _ in range(2):
        with place.held() as held:
            held.tell(phase="ready", url="http://h:1")
            held.tell(phase="draining")
            state = msgspec.json.decode((place.folder / "state.json").read_bytes())
        assert (state["phase"], state["url"]) == ("draining", "http://h:1")
    assert place.state() is None


def test_a_state_that_is_no_text_is_as_one_that_is_not_written_yet(monkeypatch, holder):
    monkeypatch.setattr("ridgeline.cluster.deployments.names.READ_WITHIN_S", 0.1)
    state = DeploymentFolder("mine").folder / "state.json"
    state.write_bytes(state.read_bytes().replace(b"http", b"\xff"))
    assert DeploymentFolder("mine").state() is None


@pytest.mark.parametrize("file", ["lock", "state.tmp"])
def test_a_folder_that_is_there_and_cannot_be_written_is_refused_with_the_fix(file):
    place = DeploymentFolder("mine")
    (place.folder / file).mkdir(parents=True)  # cannot be opened as a file, whoever runs this
    with pytest.raises(NoFolder, match="XDG_STATE_HOME"), place.held():
        pass


def test_what_cannot_be_told_any_more_ends_no_deployment(caplog):
    place = DeploymentFolder("mine")
    with place.held() as held:
        held.tell(phase="ready", url="http://h:1")
        (place.folder / "state.tmp").mkdir()  # as on a full disk: no other state can be written
        held.tell(away={"worker-1": "in restart back-off"})
        assert "state.json" in caplog.text
        state = msgspec.json.decode((place.folder / "state.json").read_bytes())
        assert (state["url"], state["away"]) == ("http://h:1", {})
