"""The process behind a router's actor, as it is in a deployment: with vLLM's app, before engines without a model."""

import asyncio
import gc
import json
import re
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import httpx

from cluster.runtime.handlers import HANDLERS
from cluster.runtime.service_process.launch import start_service
from router.garbage import FEW_STREAMS
from tests.support.fake_engine import FakeEngine
from tests.support.patience import PATIENCE_S, eventually
from tests.support.samples import router_settings
from tests.support.served_router import make_model
from worker_runtime.host import WorkerHost

FIRST, MORE = FEW_STREAMS + 20, 300
FULL = re.compile(r'^python_gc_collections_total\{generation="2"\} (\S+)$', re.MULTILINE)


async def open_stream(stack, url):
    """A stream that has its first token, and gets no other one."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    stack.callback(writer.close)
    body = json.dumps({"model": "m", "prompt": "w5 w6 w7", "max_tokens": 50, "stream": True, "ignore_eos": True})
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}".encode()
    )
    await reader.readuntil(b"data: ")


async def full_collections(url):
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        return float(FULL.search((await http.get("/metrics")).text)[1])


async def test_its_objects_are_not_looked_through_while_more_streams_begin(tmp_path):
    make_model(tmp_path)
    engines = FakeEngine("prefill"), FakeEngine("decode", stepping="manual")
    for engine in engines:
        engine.num_kv_blocks = 100_000
    hosts = [WorkerHost(engine, HANDLERS) for engine in engines]
    async with AsyncExitStack() as stack:
        for host in hosts:
            await host.start()
            stack.push_async_callback(host.stop)
        router = await start_service("cluster.runtime.services:RouterService", "router", on_gone=lambda: None)
        stack.push_async_callback(router.close)
        settings = router_settings(model_path=str(tmp_path), max_outstanding_requests=1000, max_client_share=1.0)
        await router.call("prepare", settings)
        url = await router.call("serve", [host.address for host in hosts], {}, None)
        await asyncio.gather(*(open_stream(stack, url) for _ in range(FIRST)))
        before = await full_collections(url)
        for _ in range(3):
            await asyncio.gather(*(open_stream(stack, url) for _ in range(MORE // 3)))
        await eventually(lambda: len(engines[1].running) >= 200)
        assert await full_collections(url) == before
    gc.collect()
