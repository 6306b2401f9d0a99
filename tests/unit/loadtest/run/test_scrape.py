"""Reading /metrics: with a key where it is closed, of other servers, and again and again during a round."""

import asyncio
from pathlib import Path

import httpx
import pytest

from ridgeline.loadtest.errors import ServerError
from ridgeline.loadtest.run.server import Servers, with_metrics_key
from ridgeline.loadtest.run.server_metrics import Level, MetricsDelta, add_up, parse_metrics, scrape, watch
from tests.support.patience import PATIENCE_S

PAGE = "# TYPE ridgeline_running gauge\nridgeline_running 1\n"


def closed(request):
    opened = request.headers.get("authorization") == "Bearer reader"
    return httpx.Response(200, text=PAGE) if opened else httpx.Response(401, json={"error": {}})


async def test_a_closed_page_is_read_with_its_key_and_without_it_the_error_names_the_variable(monkeypatch):
    transport = httpx.MockTransport(closed)
    async with httpx.AsyncClient(transport=transport, base_url="http://here", auth=with_metrics_key) as client:
        with pytest.raises(ServerError, match=r"set RIDGELINE_METRICS_KEY to one of its security\.metrics_keys_file"):
            await scrape(client)
        monkeypatch.setenv("RIDGELINE_METRICS_KEY", "reader")
        read = await scrape(client)
        assert read is not None
        assert list(read.gauges.values()) == [1.0]


@pytest.mark.parametrize("are_others", [False, True])
async def test_the_key_of_our_page_is_sent_to_no_other_server(are_others, monkeypatch):
    monkeypatch.setenv("RIDGELINE_METRICS_KEY", "reader")
    sent = []
    async with Servers(("http://here",), are_others=are_others).open_first() as client:
        client._transport = httpx.MockTransport(lambda request: sent.append(request) or closed(request))
        read = await scrape(client, foreign=are_others)
        await client.get("/v1/models")
    keys = [request.headers.get("authorization") for request in sent]
    assert (keys, read is None) == (([None, None], True) if are_others else (["Bearer reader", None], False))


VLLM = (Path(__file__).parent / "pages" / "vllm_0_32_metrics.txt").read_text()


def key(name, **labels):
    return name, frozenset(labels.items())


def test_another_servers_series_are_kept_if_asked_for_without_buckets():
    assert {name for name, _ in parse_metrics(VLLM).counters} == {"process_cpu_seconds_total"}
    read = parse_metrics(VLLM, foreign=True)
    assert read.counters[key("vllm:request_queue_time_seconds_count", engine="0", model_name="m")] == 3
    assert read.counters[key("vllm:num_preemptions_total", engine="0", model_name="m")] == 0
    assert read.gauges[key("vllm:kv_cache_usage_perc", engine="0", model_name="m")] == 0
    assert "_bucket" in VLLM
    assert not [name for name, _ in read.counters if name.endswith(("_bucket", "_created")) or name.startswith("http_")]
    own = '# TYPE ridgeline_ttft_seconds histogram\nridgeline_ttft_seconds_bucket{le="1"} 2\n'
    assert list(parse_metrics(own).counters.values()) == [2], (
        "quantiles of Ridgeline's own are compared with a client's"
    )


async def test_a_page_without_ridgelines_series_is_none_unless_those_of_others_are_asked_for():
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=VLLM))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        assert await scrape(client) is None
        assert await scrape(client, foreign=True) == parse_metrics(VLLM, foreign=True)


async def test_gauges_are_read_during_a_round_at_whose_end_nothing_runs():
    running, pages, told = [0, 0, 4, 8, 0, 4], 0, asyncio.Event()

    def page(_request):
        nonlocal pages
        number, pages = pages, pages + 1
        if number == len(running):
            told.set()
        if number == 3:
            return httpx.Response(500)
        gauge = running[number] if number < len(running) else 0
        return httpx.Response(
            200,
            text=f"# TYPE ridgeline_running gauge\nridgeline_running {gauge}\n"
            "# TYPE ridgeline_steps_total counter\nridgeline_steps_total 7\n"
            f"# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total {number}\n",
        )

    async with httpx.AsyncClient(transport=httpx.MockTransport(page), base_url="http://here") as client:
        async with watch(client, settle_s=0.0, every_s=0.001) as seen:
            async with asyncio.timeout(PATIENCE_S):
                await told.wait()
        delta = seen.delta(10.0)
    assert delta is not None
    assert delta.gauges[key("ridgeline_running")] == 0
    level = delta.levels[key("ridgeline_running")]
    assert (level.most, level.mean > 0, 0 < level.above_zero < 1) == (4, True, True)
    assert delta.levels.keys() == {key("ridgeline_running")}
    assert delta.total("ridgeline_steps_total") == 0


async def test_a_server_without_metrics_is_not_read_again():
    pages = []
    transport = httpx.MockTransport(lambda request: pages.append(request) or httpx.Response(404))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        async with watch(client, settle_s=0.0, every_s=0.0) as seen:
            await asyncio.sleep(0.01)
        assert (seen.delta(1.0), len(pages)) == (None, 1)


def test_levels_of_rounds_are_means_over_their_time():
    one = MetricsDelta({}, {}, 10.0, {key("a"): Level(4.0, 8.0, 1.0), key("b"): Level(2.0, 2.0, 1.0)})
    two = MetricsDelta({}, {}, 30.0, {key("a"): Level(8.0, 9.0, 0.5)})
    both = add_up([one, two])
    assert both.levels == {key("a"): Level(7.0, 9.0, 0.625), key("b"): Level(0.5, 2.0, 0.25)}
