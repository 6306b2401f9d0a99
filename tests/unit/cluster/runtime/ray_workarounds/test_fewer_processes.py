"""Ray's extra processes: Ray's real class of a head node decides what to start, and starts nothing here."""

from types import SimpleNamespace

import pytest
import ray._private.parameter
import ray._private.utils
from ray._private.node import Node

from ridgeline.cluster.runtime.ray_workarounds.fewer_processes import fewer_processes


@pytest.fixture
def started(monkeypatch):
    """Let a head node with `ray.init`'s parameters start its processes; returns the names of those it starts."""
    processes = []
    for name in ("gcs_server", "monitor", "ray_client_server", "log_monitor", "raylet"):
        monkeypatch.setattr(Node, f"start_{name}", lambda *args, _name=name: processes.append(_name))
    monkeypatch.setattr(Node, "_write_cluster_info_to_kv", lambda self: None)
    monkeypatch.setattr(Node, "get_gcs_client", lambda self: SimpleNamespace(internal_kv_put=lambda *args: None))
    monkeypatch.setattr(
        Node, "get_resource_and_label_spec", lambda self: SimpleNamespace(labels={}, object_store_memory=1)
    )
    monkeypatch.setattr(ray._private.services, "determine_plasma_store_config", lambda *args, **kwargs: ("", "", 1))

    def dashboard(self, **kwargs):
        processes.append("dashboard")

    monkeypatch.setattr(Node, "start_api_server", dashboard)

    def start():
        node = Node.__new__(Node)
        node.head, node._logs_dir = True, ""
        node._gcs_address = node._gcs_client = node._fallback_directory = node.temp_dir = None
        node._ray_params = ray._private.parameter.RayParams(include_dashboard=False)
        node._ray_params.update_if_absent(include_log_monitor=True)  # as the class does when it is made
        node.start_head_processes()
        node.start_ray_processes()
        return processes

    return start


def test_only_what_places_and_runs_actors_is_started(started):
    with fewer_processes():
        assert started() == ["gcs_server", "raylet"]


def test_a_ray_that_is_started_otherwise_has_all_of_it(started):
    with fewer_processes():
        pass
    assert started() == ["gcs_server", "monitor", "dashboard", "log_monitor", "raylet"]


def test_the_agent_is_told_that_there_is_no_dashboard_and_only_meanwhile():
    before = ray._private.utils.get_dashboard_dependency_error
    with fewer_processes():
        assert isinstance(ray._private.utils.get_dashboard_dependency_error(), ImportError)
    assert ray._private.utils.get_dashboard_dependency_error is before
