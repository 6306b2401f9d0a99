"""Debian's Prometheus scrapes a router, with the configuration and the rules of deploy/prometheus/."""

import asyncio
import contextlib
import json
import shutil
import statistics
import time
from bisect import bisect_left
from pathlib import Path

import httpx
import pytest
import yaml

from ridgeline.router.observe.metrics import LATENCY_BUCKETS, TOKEN_BUCKETS
from tests.support.fake_engine import FakeEngine
from tests.support.free_port import free_port
from tests.support.patience import PATIENCE_S
from tests.support.served_router import serving

SHIPPED = Path(__file__).parents[4] / "deploy" / "prometheus"
STREAMS = 24
STEP_S = 0.03
"""Between the steps of both engines, and so between two tokens."""
pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not there: install the package `prometheus`"
)


@contextlib.asynccontextmanager
async def prometheus(folder, target):
    """Scrape `target` each second, and yield a function that answers queries."""
    shutil.copytree(SHIPPED, folder, dirs_exist_ok=True)
    config = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "targets.yml").write_text(yaml.safe_dump([{"targets": [target]}]))
    address = f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=error",
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}/api/v1", timeout=PATIENCE_S) as http:

            async def asked(query):
                """The samples of a query; none while Prometheus starts."""
                try:
                    answer = (await http.get("/query", params={"query": query})).json()
                except (httpx.TransportError, json.JSONDecodeError):
                    return []
                assert answer["status"] == "success", answer
                return [(one["metric"], float(one["value"][1])) for one in answer["data"]["result"]]

            yield http, asked
    finally:
        process.terminate()
        await process.wait()


async def until(asked, query):
    """The samples of a query, as soon as there are some."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (samples := await asked(query)):
        assert time.monotonic() < deadline_s, f"no samples: {query}"
        await asyncio.sleep(0.2)
    return samples


async def streamed(http):
    """(TTFT, TPOT) of a stream as its client sees them, in seconds."""
    body = {"model": "m", "prompt": [5] * 8, "max_tokens": 5, "ignore_eos": True, "stream": True}
    began_s = time.monotonic()
    headers = {"x-ridgeline-ttft-ms": "30000", "x-ridgeline-tpot-ms": "1"}
    async with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        seen_s = [time.monotonic() async for line in response.aiter_lines() if line.startswith("data: {")]
    return seen_s[0] - began_s, (seen_s[-1] - seen_s[0]) / 4


async def eventually_ok(http):
    """Wait until every rule has been evaluated, without an error."""
    deadline_s = time.monotonic() + PATIENCE_S
    while "unknown" in (
        health := {
            rule["health"] for group in (await http.get("/rules")).json()["data"]["groups"] for rule in group["rules"]
        }
    ):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.2)
    assert health == {"ok"}


async def stepping(*engines):
    while True:
        await asyncio.sleep(STEP_S)
        for engine in engines:
            engine.step()


async def test_quantiles_are_within_a_bucket_of_the_clients_rules_are_evaluated_and_a_restart_alerts(model, tmp_path):
    engines = FakeEngine("prefill", stepping="manual"), FakeEngine("decode", stepping="manual")
    async with serving(model, engines, max_concurrent_requests=STREAMS) as (http, router, *_):
        target = http.base_url.netloc.decode()
        async with prometheus(tmp_path, target) as (api, asked):
            await until(asked, f'up{{job="ridgeline", instance="{target}"}} == 1')
            steps = asyncio.create_task(stepping(*engines))
            latencies = [await streamed(http) for _ in range(STREAMS)]
            await until(asked, f"sum(ridgeline_tpot_seconds_count) == {STREAMS}")
            steps.cancel()
            for name, buckets, seen_s in zip(
                ("ttft", "tpot"), (LATENCY_BUCKETS, TOKEN_BUCKETS), zip(*latencies, strict=True), strict=True
            ):
                query = f"histogram_quantile(0.5, sum by (le) (ridgeline_{name}_seconds_bucket))"
                [(_, median_s)] = await asked(query)
                apart = bisect_left(buckets, median_s) - bisect_left(buckets, statistics.median(seen_s))
                assert abs(apart) <= 1, (name, median_s, seen_s)
            slos = await until(asked, "ridgeline_slo_sequences_total")
            assert {(labels["slo"], labels["met"]): count for labels, count in slos} == {
                ("ttft", "yes"): STREAMS,
                ("tpot", "no"): STREAMS,
                ("all", "no"): STREAMS,
            }
            for series in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
                [(labels, _)] = await until(asked, f"vllm:{series}_count == {STREAMS}")
                assert labels["model_name"] == "m"
            await eventually_ok(api)
            router.fleet.restarts["decode", "decode-0", "actor_died"] += 1
            alerts = 'ALERTS{alertname="RidgelineWorkerRestarting", alertstate="firing"}'
            [(labels, _)] = await until(asked, alerts)
            assert (labels["worker"], labels["reason"]) == ("decode-0", "actor_died")
