"""One streamed completion over real sockets, from servers that misbehave in known ways."""

import asyncio
import contextlib
import time

import pytest

from ridgeline.loadtest.run.client.stream import Completion, LoadClient
from tests.support.patience import PATIENCE_S

EVENTS = b'data: {"choices":[{"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n%b" % (len(EVENTS), EVENTS)
REQUEST = Completion(0, 0.0, 4, 1, b"{}")


class _Server:
    """Answers `answers` requests on each connection, and closes it when the next one has come."""

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.connections = 0
        self.requests = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError):
            for number in range(self.answers + 1):
                await reader.readuntil(b"{}")
                self.requests += 1
                if number < self.answers:
                    writer.write(ANSWER)
        writer.close()

    @contextlib.asynccontextmanager
    async def listening(self):
        server = await asyncio.start_server(self.connected, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()


async def _complete(client: LoadClient):
    return await client.complete(REQUEST, time.perf_counter(), PATIENCE_S)


async def test_a_kept_connection_that_the_server_has_closed_is_no_failure_of_the_server():
    server = _Server(answers=1)
    async with server.listening() as url, LoadClient([url], {}) as client:
        records = [await _complete(client) for _ in range(3)]
    assert [record.error for record in records] == [None] * 3
    assert client.reconnects == 2
    assert server.connections == 3


async def test_a_server_that_closes_a_new_connection_without_an_answer_has_failed():
    server = _Server(answers=0)
    async with server.listening() as url, LoadClient([url], {}) as client:
        record = await _complete(client)
    assert "ServerDisconnectedError" in record.error
    assert (record.status, client.reconnects, server.requests) == (None, 0, 1)


async def test_a_kept_connection_that_breaks_long_after_the_request_is_a_failure(monkeypatch):
    monkeypatch.setattr("ridgeline.loadtest.run.client.stream.CLOSED_BY_SERVER_S", -1.0)
    server = _Server(answers=1)
    async with server.listening() as url, LoadClient([url], {}) as client:
        assert (await _complete(client)).ok
        assert "ServerDisconnectedError" in (await _complete(client)).error
    assert server.requests == 2


async def test_an_error_nobody_thought_of_is_a_record_too(monkeypatch):
    def fails(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr("ridgeline.loadtest.run.client.stream._take", fails)
    server = _Server(answers=1)
    async with server.listening() as url, LoadClient([url], {}) as client:
        assert (await _complete(client)).error == "RuntimeError: a bug"


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://no.such.host.invalid"])
async def test_a_server_that_is_not_there_is_a_record(url):
    async with LoadClient([url], {}) as client:
        record = await client.complete(REQUEST, time.perf_counter(), PATIENCE_S)
    assert "Client" in record.error
