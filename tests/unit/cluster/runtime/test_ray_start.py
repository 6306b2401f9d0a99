"""Starting Ray: a raylet that does not come up is tried once more, and what its start has left is ended."""

import functools
import gc
import subprocess
import sys
import warnings

import pytest
import ray
from ray._private import services

from ridgeline.cluster.config.loader import load_config
from ridgeline.cluster.runtime.handles.actor import DeploymentFailed
from ridgeline.cluster.runtime.ray_start import SYSTEM_CONFIG, ray_runtime, start_ray
from tests.support.symptoms import is_quoted

NOT_UP = "The current node timed out during startup."


class Rays:
    """Stands for `ray.init`: so many starts come to nothing, each leaving a process."""

    def __init__(self, failures, error=None):
        self.failures = failures
        self.error = error or Exception(NOT_UP)
        self.options = []
        self.left = []

    def init(self, **options):
        self.options.append(options)
        if len(self.options) <= self.failures:
            sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
            self.left.append(subprocess.Popen(sleeping))
            raise self.error


@pytest.fixture
def rays(monkeypatch):
    made = []

    def make(*arguments):
        made.append(Rays(*arguments))
        monkeypatch.setattr(ray, "init", made[-1].init)
        return made[-1]

    yield make
    for process in [process for one in made for process in one.left]:
        process.kill()
        process.wait(5)


@pytest.mark.parametrize("error", [Exception(NOT_UP), RuntimeError("Timed out waiting for file gcs_server_port")])
def test_a_ray_that_did_not_come_up_is_started_once_more_and_nothing_of_it_is_left(rays, error):
    one = rays(1, error)
    start_ray(num_cpus=2)
    assert one.options == [{"num_cpus": 2, "_system_config": SYSTEM_CONFIG}] * 2
    assert one.left[0].poll() is not None


async def test_an_address_at_which_nobody_listens_is_an_error_at_once():
    config = load_config(None, {"ray.address": "127.0.0.1:9"}).config
    with pytest.raises(DeploymentFailed, match="nothing answers") as refused:
        async with ray_runtime(config):
            pass
    assert is_quoted(str(refused.value))


@pytest.mark.parametrize("address", ["", "10.0.0.2", "192.0.2.2:", ":6379", "local"])
async def test_an_address_without_host_or_port_is_refused_with_one_that_has_both(monkeypatch, address):
    monkeypatch.setattr(ray, "init", None)
    with pytest.raises(DeploymentFailed) as refused:
        async with ray_runtime(load_config(None, {"ray.address": f"'{address}'"}).config):
            pass
    assert f"""({address or "''"})""" in str(refused.value)
    assert "HOST:PORT of Ray's head, as in 10.0.0.1:6379" in str(refused.value)


async def test_auto_where_no_ray_runs_says_so_and_not_to_give_the_address_that_was_given(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_gcs_addresses", functools.cache(set))
    monkeypatch.setattr(ray._private.utils, "read_ray_address", lambda *_: None)
    with pytest.raises(DeploymentFailed, match=r"\(auto\): no Ray runs on this machine: .*`ray start`") as refused:
        async with ray_runtime(load_config(None, {"ray.address": "auto"}).config):
            pass
    assert "Please specify" not in str(refused.value)
    assert is_quoted(str(refused.value))


@pytest.mark.parametrize(
    ("address", "variable", "parts"),
    [
        ("auto", "ray://10.0.0.1:10001", ["Ray's client", "auto means RAY_ADDRESS", "unset it"]),
        ("auto", "http://10.0.0.1:8265", ["its jobs", "auto means RAY_ADDRESS"]),
        ("auto", "127.0.0.1:9", ["nothing answers", "auto means RAY_ADDRESS here, which is 127.0.0.1:9"]),
        ("ray://10.0.0.1:10001", "", ["Ray's client", "port 6379"]),
    ],
)
async def test_an_address_of_the_shell_that_is_none_of_rays_head_is_named(monkeypatch, address, variable, parts):
    monkeypatch.setenv("RAY_ADDRESS", variable)
    with pytest.raises(DeploymentFailed) as refused:
        async with ray_runtime(load_config(None, {"ray.address": address}).config):
            pass
    assert all(part in str(refused.value) for part in parts), refused.value
    assert ("RAY_ADDRESS" in str(refused.value)) == bool(variable)
    assert is_quoted(str(refused.value))


def test_python_does_not_warn_of_the_processes_of_a_start_that_came_to_nothing(monkeypatch):
    starts = []

    def init(**options):
        starts.append(options)
        if len(starts) == 1:
            process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            raise Exception(NOT_UP, process)

    monkeypatch.setattr(ray, "init", init)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start_ray()
        gc.collect()
    assert [str(one.message) for one in caught if one.category is ResourceWarning] == []


def test_one_that_does_not_come_up_again_is_told_with_where_its_logs_are(rays):
    one = rays(2)
    with pytest.raises(DeploymentFailed, match=r"2 times: The current node timed out .*/logs"):
        start_ray()
    assert all(process.poll() is not None for process in one.left)


def test_what_another_start_would_not_mend_is_raised_as_it_is(rays):
    one = rays(1, ValueError("object_store_memory is too small"))
    with pytest.raises(ValueError, match="too small"):
        start_ray()
    assert len(one.options) == 1
