"""What the service of a router does to its process, with hundreds of streams: vLLM's app, engines without a model."""

import asyncio
import gc
import json
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import pytest
from prometheus_client import CollectorRegistry

from ridgeline.cluster.runtime.handlers import HANDLERS
from ridgeline.cluster.runtime.services import RouterService
from ridgeline.worker_runtime.host import WorkerHost
from tests.support.fake_engine import FakeEngine
from tests.support.patience import eventually
from tests.support.samples import router_settings
from tests.support.served_router import make_model

FEW, MORE = 60, 180
"""Streams. With so many more, Python by itself would look through all objects once; 90 are too few for that."""


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


def full_collections():
    return gc.get_stats()[2]["collections"]


@pytest.mark.long
async def test_its_objects_are_not_looked_through_while_more_streams_begin(tmp_path, monkeypatch):
    monkeypatch.setattr("ridgeline.router.server.REGISTRY", CollectorRegistry())
    monkeypatch.setattr("ridgeline.router.gc_schedule.FEW_STREAMS", FEW)
    make_model(tmp_path)
    engines = FakeEngine("prefill"), FakeEngine("decode", stepping="manual")
    for engine in engines:
        engine.num_kv_blocks = 100_000
    hosts = [WorkerHost(engine, HANDLERS) for engine in engines]
    service = RouterService()
    async with AsyncExitStack() as stack:
        for host in hosts:
            await host.start()
            stack.push_async_callback(host.stop)
        await service.prepare(
            router_settings(
                model_path=str(tmp_path),
                max_concurrent_requests=1000,
                request_timeout_s=600.0,  # a busy machine takes longer than 30 s to open all of them
                max_queue_time_s=600.0,
            )
        )
        url = await service.serve([host.address for host in hosts], {}, None, some=False)
        stack.push_async_callback(service.stop)
        stack.callback(gc.freeze)  # as tests/conftest.py has done
        stack.callback(service._gc_schedule.stop)
        await asyncio.gather(*(open_stream(stack, url) for _ in range(FEW + 20)))
        before = full_collections()
        for _ in range(3):
            await asyncio.gather(*(open_stream(stack, url) for _ in range(MORE // 3)))
        await eventually(lambda: len(engines[1].running) >= FEW)
        assert full_collections() == before
