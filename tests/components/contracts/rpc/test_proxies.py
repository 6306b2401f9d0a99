"""Proxies that a company's shell names are for the world outside: our own processes reach each other directly."""

import asyncio

import grpc
import grpc.aio
import pytest
from rich.console import Console

from ridgeline.cluster.commands.top import watch
from ridgeline.contracts.rpc.channel import add_port, open_aio_channel, open_channel
from ridgeline.loadtest.errors import ServerError
from tests.support.certificates import Authority
from tests.support.http_server import listening
from tests.support.patience import PATIENCE_S

NOBODY = "http://127.0.0.1:9"
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


@pytest.fixture(params=[*PROXIES, *map(str.upper, PROXIES)])
def _proxied_shell(request, monkeypatch):
    for name in (*PROXIES, "no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv(request.param, NOBODY)


async def _echo(request, context):
    return request


@pytest.mark.usefixtures("_proxied_shell")
@pytest.mark.parametrize("secure", [False, True])
async def test_no_channel_goes_through_a_proxy_of_the_shell(tmp_path, secure):
    tls = Authority(tmp_path, "ours").issue() if secure else None
    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler("test", {"echo": grpc.unary_unary_rpc_method_handler(_echo)})
    server.add_generic_rpc_handlers((handler,))
    address = f"127.0.0.1:{add_port(server, '127.0.0.1:0', tls)}"
    await server.start()
    try:
        async with open_aio_channel(address, [], tls) as channel:
            answer = await channel.unary_unary("/test/echo")(b"aio", timeout=PATIENCE_S, wait_for_ready=False)
        assert answer == b"aio"
        with open_channel(address, [], tls) as channel:
            answer = await asyncio.to_thread(channel.unary_unary("/test/echo"), b"sync", timeout=PATIENCE_S)
        assert answer == b"sync"
    finally:
        await server.stop(None)


async def _page(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"other_metric 1\n"})


@pytest.mark.usefixtures("_proxied_shell")
async def test_top_reads_the_server_and_not_a_proxy_of_the_shell():
    async with listening(_page) as url:
        with pytest.raises(ServerError, match="publishes no ridgeline_ metrics"):
            await watch(url, interval_s=0.01, count=1, console=Console(quiet=True))
