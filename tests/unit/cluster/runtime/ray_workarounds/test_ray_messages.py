"""Ray's own words: never on the user's terminal. Ray's real listening thread, without a Ray."""

import logging
import threading
from types import SimpleNamespace

import pytest
from ray import JobID
from ray._private import worker as ray_worker

from ridgeline.cluster.runtime.ray_workarounds.ray_messages import ray_messages_in_a_file

DIED = "A worker died or was killed while executing a task by an unexpected system error."


@pytest.fixture
def published(monkeypatch):
    """Let Ray's driver hear what a node has published."""
    monkeypatch.setattr(ray_worker, "_internal_kv_initialized", lambda: False)

    def listen():
        ended = threading.Event()

        def poll():
            ended.set()
            return None, {"job_id": JobID.nil().binary(), "type": "worker_died", "error_message": DIED}

        subscriber = SimpleNamespace(subscribe=lambda: None, poll=poll)
        ray_worker.listen_error_messages(
            SimpleNamespace(gcs_error_subscriber=subscriber, current_job_id=JobID.nil()), ended
        )

    return listen


def test_what_a_node_publishes_goes_to_the_file_and_not_to_the_terminal(published, capsys):
    with ray_messages_in_a_file() as log_file:
        published()
        assert f"(raylet) {DIED}" in log_file.read_text()
    assert capsys.readouterr() == ("", "")
    assert DIED in log_file.read_text()
    log_file.unlink()


def test_what_rays_driver_logs_goes_there_too(capsys):
    with ray_messages_in_a_file() as log_file:
        logging.getLogger("ray.util").error("no")
        assert log_file.read_text() == "no\n"
    assert capsys.readouterr() == ("", "")
    log_file.unlink()


def test_afterwards_all_is_as_before_and_a_file_without_messages_is_gone(published, capsys):
    before = ray_worker.print_to_stdstream, logging.getLogger("ray").handlers[:]
    with ray_messages_in_a_file() as log_file:
        pass
    assert not log_file.exists()
    assert (ray_worker.print_to_stdstream, logging.getLogger("ray").handlers) == before
    published()
    assert DIED in capsys.readouterr().out, "so Ray does print it"


def test_no_file_stays_that_says_only_what_is_said_at_every_start():
    with ray_messages_in_a_file() as log_file:
        logging.getLogger("ray").warning(
            "2026-11-26 16:03:19 WARNING setup.py:85 -- Token authentication is enabled for this Ray "
            "cluster. Set RAY_AUTH_MODE=disabled to opt out."
        )
        with log_file.open("a") as errors:
            errors.write("Triton is installed, but doesn't include CPU backend. Disabling Triton.\n")
    assert not log_file.exists()
