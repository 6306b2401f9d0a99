"""Keys that change while the server runs: their files are read again, and each router takes the new ones."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from ridgeline.cluster.config.models import SecurityConfig
from ridgeline.cluster.runtime import deployment as deployment_module
from ridgeline.cluster.runtime.deployment import Deployment
from ridgeline.cluster.runtime.handles.actor import DeploymentFailed
from ridgeline.cluster.runtime.handles.routing import RouterHandle
from tests.support.samples import router_settings
from tests.support.served_router import serving

PATHS = {"api": "/v1/models", "admin": "/ridgeline/workers", "metrics": "/metrics"}


class Handle(RouterHandle):
    """That of a router in this process; `lost` says how often it cannot be asked."""

    def __init__(self, router, settings, lost=0):
        self.name, self._router, self._settings, self._lost = "router", router, settings, lost

    async def call(self, method, *args, timeout_s=None):
        self._lost -= 1
        if self._lost >= 0:
            raise DeploymentFailed("router is gone")
        return await getattr(self._router, method)(*args)


async def opened(http, key):
    """Which kinds of paths it opens."""
    answers = {name: await http.get(path, headers={"x-api-key": key}) for name, path in PATHS.items()}
    return {name for name, answer in answers.items() if answer.status_code == 200}


async def becomes(http, wanted):
    """Wait until each key opens what it should, and no more."""
    async with asyncio.timeout(30):
        while {key: await opened(http, key) for key in wanted} != wanted:  # noqa: ASYNC110 - files have no event
            await asyncio.sleep(0.01)


async def test_the_next_request_needs_a_key_of_the_files_as_they_are_now(model, tmp_path, monkeypatch):
    monkeypatch.setattr(deployment_module, "KEYS_EVERY_S", 0.01)
    paths = {name: tmp_path / f"{name}.keys" for name in PATHS}
    for name, path in paths.items():
        path.write_text(f"old-{name}\n")
    files = SecurityConfig(**{f"{name}_keys_file": str(path) for name, path in paths.items()})
    hashes = files.keys()
    keys = {"api_key_hashes": hashes.clients, "admin_key_hashes": hashes.admins, "metrics_key_hashes": hashes.metrics}
    async with serving(model, **keys) as (http, router, _, _):
        handle, said = Handle(router, router_settings(**keys), lost=1), []
        deployment = Deployment("url", [], [], [handle], None, None, None, read_keys=files.keys)
        following = asyncio.create_task(deployment._follow_key_files(said.append))
        try:
            old = {"old-api": {"api"}, "old-admin": {"admin", "metrics"}, "old-metrics": {"metrics"}}
            await becomes(http, old | {"new-api": set()})
            assert said == []
            paths["api"].write_text("old-api\nnew-api\n")
            await becomes(http, old | {"new-api": {"api"}})
            assert said == ["router has the former keys: router is gone", deployment_module.NEW_KEYS]
            for name, path in paths.items():
                path.write_text(f"new-{name}\n")
            new = {key.replace("old", "new"): paths for key, paths in old.items()}
            await becomes(http, new | {key: set() for key in old})
            paths["admin"].write_text("new-api\n")  # which a client has
            await asyncio.sleep(0.1)
            assert "is a client's key too" in said[-1]
            await becomes(http, new)
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following


class Silent(RouterHandle):
    """That of a router that takes its time: `answers` is set when it does."""

    def __init__(self, name):
        self.name, self._settings, self.answers = name, router_settings(), asyncio.Event()

    async def call(self, method, *args, timeout_s=None):
        try:
            async with asyncio.timeout(0.05):
                await self.answers.wait()
        except TimeoutError as error:
            raise DeploymentFailed(f"{self.name} did not finish") from error


async def test_a_router_that_does_not_answer_keeps_no_other_one_from_the_new_keys(monkeypatch):
    monkeypatch.setattr(deployment_module, "KEYS_EVERY_S", 0.01)
    routers = [Silent(f"router-{number}") for number in range(16)]
    late = routers[0], routers[7]
    for router in {*routers} - {*late}:
        router.answers.set()
    new = replace(SecurityConfig().keys(), clients=frozenset({b"new"}))
    said = asyncio.Queue()
    deployment = Deployment("url", [], [], routers, None, None, None, read_keys=lambda: new)
    following = asyncio.create_task(deployment._follow_key_files(said.put_nowait))
    try:
        async with asyncio.timeout(30):
            assert await said.get() == (
                "router-0 has the former keys: router-0 did not finish; "
                "router-7 has the former keys: router-7 did not finish"
            )
            assert [router for router in routers if not router._settings.api_key_hashes] == [*late]
            await asyncio.sleep(0.2)
            assert said.empty(), "it was said, though it is tried again and again"
            for router in late:
                router.answers.set()
            assert await said.get() == deployment_module.NEW_KEYS
        assert {router._settings.api_key_hashes for router in routers} == {new.clients}
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following


async def test_a_router_that_is_started_again_has_the_new_keys():
    class Asked:
        async def use_keys(self, settings):
            pass

    settings = router_settings(api_key_hashes=frozenset({b"old"}))
    handle = Handle(Asked(), settings)
    new = replace(SecurityConfig().keys(), clients=frozenset({b"new"}))
    assert [await handle.use_keys(new), await handle.use_keys(new)] == [True, False]
    assert handle._settings == replace(settings, api_key_hashes=frozenset({b"new"}))


@pytest.fixture(autouse=True)
def no_keys_of_the_shell(monkeypatch):
    monkeypatch.delenv("RIDGELINE_API_KEYS", raising=False)
