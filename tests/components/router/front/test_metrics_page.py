"""GET /metrics gives way to streams while it is rendered, and opens to keys of its own if there are some."""

import asyncio

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.applications import Starlette
from starlette.routing import Route

import ridgeline.router.front.metrics_page
from ridgeline.router.client_identity import hash_key
from ridgeline.router.front.metrics_page import PIECE_SAMPLES, metrics_endpoint, page_of
from ridgeline.router.observe.metrics import RequestMetrics
from ridgeline.router.server import metrics_readers
from tests.support.samples import router_settings


class Wide:
    """Collects more samples of one family than are rendered at a time, one without any, and a counter."""

    def collect(self):
        wide = GaugeMetricFamily("wide", "Many\nsamples \\ of it", labels=["worker"])
        for number in range(5 * PIECE_SAMPLES + 1):
            wide.add_metric([f'w"{number}'], number)
        yield wide
        yield GaugeMetricFamily("empty", "None", labels=["worker"])
        counter = CounterMetricFamily("counted", "Some", labels=["worker"])
        for number in range(PIECE_SAMPLES):
            counter.add_metric([f"w{number}"], number)
        yield counter


@pytest.fixture
def registry():
    registry = CollectorRegistry()
    RequestMetrics(registry).observe("ttft", "prefill", 0.5)
    registry.register(Wide())
    return registry


async def test_the_page_in_pieces_is_the_page_of_the_library(registry):
    assert await page_of(registry) == generate_latest(registry)


async def test_the_event_loop_turns_after_each_piece_of_a_page(registry, monkeypatch):
    monkeypatch.setattr("ridgeline.router.front.metrics_page.SLICE_S", 0.0)
    generate, since_turn = ridgeline.router.front.metrics_page.generate_latest, []

    def counting(piece):
        since_turn.append(sum(len(family.samples) for family in piece.collect()))
        return generate(piece)

    monkeypatch.setattr(ridgeline.router.front.metrics_page, "generate_latest", counting)
    most, rendering = [], asyncio.create_task(page_of(registry))
    while not rendering.done():
        most.append(sum(since_turn))
        since_turn.clear()
        await asyncio.sleep(0)
    most.append(sum(since_turn))
    assert sum(most) > 6 * PIECE_SAMPLES
    assert max(most) <= PIECE_SAMPLES, "samples between two turns of the loop"


def client_of(registry, **settings):
    async def refresh():
        pass

    endpoint = metrics_endpoint(refresh, registry, metrics_readers(router_settings(**settings)))
    app = Starlette(routes=[Route("/metrics", endpoint)])
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")


def bearer(key):
    return {"authorization": f"Bearer {key}"}


CLIENTS = {"api_key_hashes": {hash_key(b"client")}, "admin_key_hashes": frozenset({hash_key(b"operator")})}
READERS = CLIENTS | {"metrics_key_hashes": frozenset({hash_key(b"reader")})}


@pytest.mark.parametrize(
    ("keys", "shown", "status"),
    [
        pytest.param(CLIENTS, {}, 200, id="open where there is no key for it"),
        *((READERS, shown, 401) for shown in ({}, bearer("client"), bearer("wrong"), {"x-api-key": "client"})),
        *((READERS, shown, 200) for shown in (bearer("reader"), bearer("operator"), {"x-api-key": "reader"})),
    ],
)
async def test_who_may_read_the_page(registry, keys, shown, status):
    async with client_of(registry, **keys) as http:
        page = await http.get("/metrics", headers=shown)
    assert page.status_code == status
    if status == 401:
        assert "security.metrics_keys_file" in page.json()["error"]["message"]
        assert page.headers["www-authenticate"].startswith("Bearer")
    else:
        assert "ridgeline_ttft_seconds_count" in page.text
