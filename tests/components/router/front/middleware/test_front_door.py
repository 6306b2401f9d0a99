"""Keys, proxies and operators' paths at the real router with vLLM's real app: what a stranger can and cannot do."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import re
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

import ridgeline.router.front.app
import ridgeline.router.front.metrics_page
from ridgeline.cluster.runtime.actors import ServiceActor
from ridgeline.cluster.runtime.environment import SERVER_VARIABLES, apart_from_the_shell, server_variables
from ridgeline.router.client_identity import hash_key
from ridgeline.router.front.http.context import current
from ridgeline.router.front.http.routes import ON_WISH, OPEN_PATHS, ROUTES, keep_known_routes
from ridgeline.router.front.middleware.auth import KeyGuard
from ridgeline.router.front.single_flight import BURST
from tests.support import ipv6
from tests.support.served_router import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEY = "a-clients-key"
BEARER = {"authorization": f"Bearer {KEY}"}
CARELESS = {
    "FORWARDED_ALLOW_IPS": "*",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_ENABLE_COHERE_API": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "WEB_CONCURRENCY": "4",
}
PAGE = "https://chat.example"
FORGED = {"x-forwarded-for": "192.0.2.7", "x-forwarded-proto": "https"}


@pytest.fixture(scope="module")
def seen():
    """What the guard was told of each request, and what it told the app: the socket's peer and the client's name."""
    return []


@pytest.fixture(scope="module", autouse=True)
def a_careless_shell(seen, apps):
    """Each router is the only one of its process, and is started as a shell would that trusts every proxy."""
    from vllm.entrypoints.launchers.app import build_app

    def watch(app):
        async def watching(scope, receive, send):
            if scope["type"] == "http":
                seen.append((scope["client"][0], current().client))
            await app(scope, receive, send)

        return watching

    def layers(ours, *args):
        """As they are, and one that looks at what the key guard has let in."""
        made = list(ours(*args))
        guard = next(i for i, layer in enumerate(made) if getattr(layer, "func", None) is KeyGuard)
        return (*made[: guard + 1], watch, *made[guard + 1 :])

    def built(*args):
        """With what only the first import in a process does, whoever was first here."""
        from model_hosting_container_standards import logging_config

        logging_config.configure_root_logger()
        assert not logging.getLogger("ridgeline.router.front.vllm_workarounds.unread").isEnabledFor(logging.WARNING)
        return build_app(*args)

    def kept(app):
        made = {route.path for route in app.router.routes}
        keep_known_routes(app)
        apps.append((made, app))

    with pytest.MonkeyPatch.context() as patch:
        for variable, value in CARELESS.items():
            patch.setenv(variable, value)
        patch.setattr("ridgeline.router.front.app.vllm_app.build_app", built)
        patch.setattr("ridgeline.router.front.app.layers", partial(layers, ridgeline.router.front.app.layers))
        patch.setattr("ridgeline.router.front.app.keep_known_routes", kept)
        yield patch


@pytest.fixture(scope="module")
def apps():
    """What vLLM has made of each app, and what is left of its routes."""
    return []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keyed(model):
    """(HTTP client, router, engines) of a router whose clients have a key."""
    keys = frozenset({hash_key(KEY.encode())})
    # Prefill makes no step by itself here: /ready says so as soon as its time is up.
    settings = {"api_key_hashes": keys, "cors_allowed_origins": (PAGE,), "ready_deadline_s": 0.5}
    async with serving(model, **settings) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def behind_a_proxy(model):
    """The same without keys and with a proxy on this machine."""
    async with serving(model, trusted_proxies=(ipaddress.ip_network("127.0.0.0/8"),)) as served:
        yield served


async def test_a_forwarded_address_changes_nothing_whatever_the_servers_environment_says(keyed, seen):
    http = keyed[0]
    seen.clear()
    assert (await http.get("/v1/models", headers={**BEARER, **FORGED})).status_code == 200
    assert seen == [("127.0.0.1", hash_key(KEY.encode()).hex()[:12])]


async def test_a_trusted_proxy_names_the_client_and_the_peer_stays_the_proxy(behind_a_proxy, seen):
    http = behind_a_proxy[0]
    seen.clear()
    assert (await http.get("/v1/models", headers=FORGED)).status_code == 200
    assert (await http.get("/v1/models")).status_code == 200
    assert seen == [("127.0.0.1", "192.0.2.7"), ("127.0.0.1", "127.0.0.1")]


async def test_whoever_comes_through_a_trusted_proxy_is_no_operator(behind_a_proxy):
    http, deployed, _, _ = behind_a_proxy
    for headers in ({}, FORGED, {"x-forwarded-for": "127.0.0.1"}):
        wish = {"worker": "decode-0", "timeout_s": 0, "force": True}
        assert (await http.post("/ridgeline/drain", json=wish, headers=headers)).status_code == 403
        assert (await http.get("/ridgeline/workers", headers=headers)).status_code == 403
    assert deployed.fleet.get("decode-0").usable


# --- routes


async def test_every_route_is_in_the_table_and_what_a_developers_shell_adds_is_taken_away(keyed, apps):
    made, app = apps[0]
    assert {"/sleep", "/collective_rpc", "/update_weights"} <= made - set(ROUTES)
    loading = [route for route in app.router.routes if route.path == "/v1/load_lora_adapter"]
    assert "/v1/load_lora_adapter" in made
    assert [route.endpoint.__module__ for route in loading] == ["ridgeline.router.front.admin"]
    assert {route.path for route in app.router.routes} == set(ROUTES) - ON_WISH
    http = keyed[0]
    for path in sorted(made - set(ROUTES)):
        for method in ("GET", "POST"):
            reply = await http.request(method, path.replace("{", "").replace("}", ""), headers=BEARER, json={})
            assert reply.status_code in (404, 405), path


async def test_each_route_answers_those_it_is_for_and_nobody_else(keyed):
    http = keyed[0]
    methods = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS")

    async def statuses(path, headers):
        written = path.replace("{response_id}", "none").replace("{model:path}", "none")
        answers = await asyncio.gather(*(http.request(method, written, headers=headers) for method in methods))
        return [answer.status_code for answer in answers]

    for path, callers in ROUTES.items():
        asked = zip(methods, await statuses(path, {}), await statuses(path, BEARER), strict=True)
        for method, stranger, client in asked:
            if callers == "operators":
                assert (stranger, client) == (403, 403), (method, path)
            elif path in OPEN_PATHS and method in ("GET", "HEAD"):
                assert stranger not in (401, 403), (method, path)
            else:
                assert stranger == 401, (method, path)  # those of `ON_WISH`, which are not there, too
                assert client != 401, (method, path)


async def test_what_vllms_app_imports_does_not_silence_the_routers_warnings(keyed):
    assert logging.getLogger("ridgeline.router.front.vllm_workarounds.unread").isEnabledFor(logging.WARNING)
    assert all(handler.level <= logging.WARNING for handler in logging.root.handlers)


async def test_an_actors_process_forgets_the_variables_before_vllm_could_read_them(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "another")
    monkeypatch.setenv("SAGEMAKER_MODEL_PATH", "x")
    for variable in ("RIDGELINE_API_KEYS", "RIDGELINE_METRICS_KEY", "RIDGELINE_API_KEY", "RIDGELINE_API_KEY_VLLM"):
        monkeypatch.setenv(variable, KEY)
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/somewhere")
    for variable in CARELESS:
        monkeypatch.setenv(variable, "1")
    before = dict(os.environ)
    with apart_from_the_shell():
        assert server_variables() == []
        assert KEY not in os.environ.values()
    assert dict(os.environ) == before
    ServiceActor("ridgeline.cluster.runtime.services:RouterService", "router")
    assert server_variables() == []
    assert KEY not in os.environ.values()
    assert os.environ["VLLM_CACHE_ROOT"] == "/somewhere"


LIMITS_AND_CACHES = re.compile(
    "VLLM_((AUDIO|IMAGE|VIDEO)_FETCH_TIMEOUT|MEDIA_FETCH_MAX_RETRIES|MAX_AUDIO_[A-Z_]+|MAX_(N_SEQUENCES|STOP_STRINGS)"
    "|MAX_COMPLETION_PROMPTS|CHAT_TEMPLATE_RENDER_TIMEOUT|TOOL_PARSE_REGEX_TIMEOUT_SECONDS|LOG_STATS_INTERVAL"
    "|CPU_KVCACHE_SPACE|DISABLE_LOG_LOGO|USE_RUST_BENCH)"
)


async def test_every_variable_that_vllms_server_reads_is_one_that_we_have_judged():
    import vllm.entrypoints

    files = Path(vllm.entrypoints.__file__).parent.rglob("*.py")
    read = {name for file in files for name in re.findall(r"\benvs\.(VLLM_[A-Z0-9_]+)", file.read_text())}
    assert len(read) > 20
    assert [name for name in read - SERVER_VARIABLES if not LIMITS_AND_CACHES.fullmatch(name)] == []


# --- pages in a browser


def preflight(origin, method="POST"):
    return {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization,content-type",
    }


OTHER_PAGES = ("https://elsewhere.example", "http://chat.example", f"{PAGE}:8443", "null", f"{PAGE}.evil.example")


async def test_a_named_page_may_use_a_server_with_keys_and_read_its_refusals_and_others_are_told_nothing(keyed):
    http = keyed[0]
    asked = await http.options("/v1/chat/completions", headers=preflight(PAGE))
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "authorization" in asked.headers["access-control-allow-headers"]
    for headers, status in ((BEARER, 200), ({}, 401)):
        listed = await http.get("/v1/models", headers={**headers, "origin": PAGE})
        assert (listed.status_code, listed.headers.get_list("access-control-allow-origin")) == (status, [PAGE])
    for origin in OTHER_PAGES:
        assert (await http.options("/v1/models", headers=preflight(origin))).status_code == 400
        reply = await http.get("/v1/models", headers={**BEARER, "origin": origin})
        assert "access-control-allow-origin" not in reply.headers
    operators = await http.options("/ridgeline/drain", headers=preflight(PAGE))
    assert (operators.status_code, "access-control-allow-origin" in operators.headers) == (403, False)


async def test_without_the_setting_no_page_may_use_the_server(behind_a_proxy):
    http = behind_a_proxy[0]
    assert (await http.options("/v1/models", headers=preflight(PAGE))).status_code == 400
    reply = await http.get("/v1/models", headers={"origin": PAGE})
    assert not [name for name in reply.headers if name.startswith("access-control")]
    body = '{"model": "m", "prompt": "w1", "max_tokens": 1}'
    without_asking = {"origin": PAGE, "content-type": "text/plain"}
    for path in ("/v1/completions", "/tokenize", "/v1/responses"):
        assert (await http.post(path, content=body, headers=without_asking)).status_code in (400, 415, 422), path


# --- open pages


async def test_fifty_scrapes_at_once_share_a_few_renderings(keyed, monkeypatch):
    http = keyed[0]
    rendered = []
    page_of = ridgeline.router.front.metrics_page.page_of
    monkeypatch.setattr(
        "ridgeline.router.front.metrics_page.page_of", lambda registry: rendered.append(1) or page_of(registry)
    )
    pages = await asyncio.gather(*(http.get("/metrics") for _ in range(50)))
    assert {page.status_code for page in pages} == {200}
    assert pages[0].headers["content-type"].startswith("text/plain; version=0.0.4")
    assert all("ridgeline_requests_in_flight" in page.text for page in pages)
    assert len(rendered) <= BURST + 1


# --- IPv6


@pytest.mark.skipif(not ipv6.HERE, reason="this machine has no IPv6")
async def test_a_server_for_both_address_families_serves_both_with_workers_on_ipv6(model, seen):
    async with serving(model, host="::", workers_host="::1") as (http, _, _, _):
        assert re.fullmatch(r"http://\[::]:[0-9]+", str(http.base_url).rstrip("/"))
        for host, name in (("[::1]", "::/64"), ("127.0.0.1", "127.0.0.1")):
            url = f"http://{host}:{http.base_url.port}"
            seen.clear()
            assert (await http.get(f"{url}/v1/models")).status_code == 200
            assert seen[0][1] == name
            rows = (await http.get(f"{url}/ridgeline/workers")).json()["workers"]
            assert [row["host"] for row in rows] == ["::1", "::1"], "an operator of this machine, by either address"
