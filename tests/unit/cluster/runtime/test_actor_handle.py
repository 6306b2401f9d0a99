"""An actor that Ray does not place, or that does not answer: given up after what the configuration says."""

import asyncio

import pytest

from cluster.config.loader import load_config
from cluster.runtime.handles.actor import ActorHandle, DeploymentFailed, NoPlace
from cluster.runtime.handles.heads import reachable


class Silent:
    """A handle whose calls nobody answers."""

    def __getattr__(self, method):
        return self

    def remote(self, *_):
        return asyncio.get_running_loop().create_future()


def handle(**settings):
    return ActorHandle(
        "worker-1", Silent(), load_config(None, {k.replace("__", "."): v for k, v in settings.items()}).config
    )


async def test_a_worker_without_a_place_is_given_up_after_the_configured_time():
    with pytest.raises(NoPlace, match=r"no place for worker-1 within 0 s \(ray\.placement_timeout_s\)"):
        await handle(ray__placement_timeout_s="0.01").find_place()


async def test_a_start_that_takes_too_long_names_the_setting_and_a_call_with_a_limit_of_its_own_does_not():
    waiting = handle()
    assert waiting._start_timeout_s == 900
    waiting._start_timeout_s = 0.01
    with pytest.raises(DeploymentFailed, match=r"did not finish start within 0 s \(supervision\.start_timeout_s\)"):
        await waiting.call("start")
    with pytest.raises(DeploymentFailed, match=r"did not finish drain within 0 s$"):
        await waiting.call("drain", timeout_s=0.01)


def test_a_joined_cluster_is_given_the_time_its_nodes_need_to_boot():
    alone, joined = load_config().config, load_config(None, {"ray.address": "auto"}).config
    assert (alone.ray.patience_s, joined.ray.patience_s) == (120, 1800)
    assert load_config(None, {"ray.address": "auto", "ray.placement_timeout_s": "7"}).config.ray.patience_s == 7


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://0.0.0.0:8000", "http://10.0.0.7:8000"),
        ("http://[::]:8000", "http://10.0.0.7:8000"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://a-node.example:80", "http://a-node.example:80"),
    ],
)
def test_a_server_on_all_addresses_is_told_at_its_nodes(url, told):
    assert reachable(url, "10.0.0.7") == told
