"""Two clients of one server, each a process: a polite one that measures, and one that tries everything at once.

Plain sockets and the standard library, so that the clients' own work is small and starts at once.
`python clients.py polite|hostile PORT KEY` reads commands from its standard input, one a line, and answers each with a
line of JSON when it is done.

The hostile one would sit on machines of its own. Here it shares the router's, so each of its attacks pauses between two
tries: it takes a twentieth of a core itself, and what it costs is what the service does for it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

LONGEST = 4000
CONCURRENT = 8
"""Enough that what one long prompt of another client's takes of a worker is a small part of the TTFT."""


def request(key: str, path: str, body: bytes, **headers: str) -> bytes:
    """As bytes."""
    lines = [f"POST {path} HTTP/1.1", "host: server", f"authorization: Bearer {key}", "content-type: application/json"]
    lines += [
        f"content-length: {len(body)}",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def completion(prompt_tokens: int = 8, **fields: Any) -> bytes:
    """A body."""
    return json.dumps({"model": "m", "prompt": [5] * prompt_tokens, "ignore_eos": True, **fields}).encode()


async def status_of(reader: asyncio.StreamReader) -> int:
    """Of the answer that begins here."""
    return int((await reader.readline()).split()[1])


PAGES_AT_A_TIME = 2
"""Connections that ask for each open page again and again, 20 times a second each."""


class Polite:
    """Asks for streams and reads them to the end, `CONCURRENT` at a time."""

    def __init__(self, port: int, key: str) -> None:
        self._port, self._key = port, key

    async def measure(self, requests: int) -> dict[str, Any]:
        """TTFT of each, the time to its end, and what was not answered."""
        found: dict[str, list[float]] = {"ttft_s": [], "whole_s": []}
        refused = Counter[str]()

        async def some() -> None:
            for _ in range(requests // CONCURRENT):
                try:
                    async with asyncio.timeout(30):
                        await self._one(found, refused)
                except (OSError, EOFError, TimeoutError, ValueError, IndexError) as error:
                    refused[type(error).__name__] += 1

        await asyncio.gather(*(some() for _ in range(CONCURRENT)))
        return {**found, "refused": dict(refused)}

    async def _one(self, found: dict[str, list[float]], refused: Counter[str]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            began_s = time.perf_counter()
            writer.write(request(self._key, "/v1/completions", completion(1500, max_tokens=4, stream=True)))
            status = await status_of(reader)
            if status != 200:
                refused[f"{status}: {(await reader.read(2000))[-300:].decode()}"] += 1
                return
            while not (await reader.readuntil(b"\n")).startswith(b"data: {"):
                pass
            ttft_s = time.perf_counter() - began_s
            while not (await reader.readuntil(b"\n")).startswith(b"data: [DONE]"):
                pass
            found["ttft_s"].append(ttft_s)
            found["whole_s"].append(time.perf_counter() - began_s)
        finally:
            writer.close()


class Hostile:
    """Everything at once, again and again, from `on` to `off`."""

    def __init__(self, port: int, key: str) -> None:
        self._port, self._key = port, key
        self._running: list[asyncio.Task[None]] = []
        self._sockets: list[socket.socket] = []
        self.statuses: Counter[str] = Counter()
        self._answered = asyncio.Event()

    async def on(self, sockets: int) -> dict[str, Any]:
        """Begin, with so many sockets that never read; returns when those are there."""
        for number in range(sockets):
            await self._never_read(number)
        attacks = {
            "n 512": (0.2, completion(1, n=512, max_tokens=2000, stream=True), {}, False),
            "n 300": (0.1, completion(1, n=300, max_tokens=2000, stream=True), {}, False),
            "long id": (0.2, completion(stream=True, n=8, max_tokens=100), {"x_request_id": "i" * 64_000}, True),
            "prompt logprobs": (0.02, completion(LONGEST, prompt_logprobs=20, max_tokens=1), {}, True),
            "millions of parts": (1.0, b'{"model":"m","prompt":[' + b"[]," * 2_000_000 + b"[]]}", {}, True),
        }
        for name, (pause_s, body, headers, reads) in attacks.items():
            self._start(self._again(name, "/v1/completions", pause_s, body, headers, reads=reads))
        drain = json.dumps({"worker": "worker-1", "timeout_s": 0, "force": True}).encode()
        self._start(self._again("drain", "/ridgeline/drain", 0.2, drain, {}, reads=True))
        return {}

    async def pages(self) -> dict[str, Any]:
        """Begin to ask for the open pages, without a key, from connections of their own."""
        for path in ("/metrics", "/ready"):
            for _ in range(PAGES_AT_A_TIME):
                self._start(self._page(path))
        return {}

    async def answered(self) -> dict[str, Any]:
        """Wait until a request that is much work has been answered."""
        await self._answered.wait()
        return {}

    async def off(self) -> dict[str, Any]:
        """End all of it; what was answered, by attack and status."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()
        found, self.statuses = self.statuses, Counter()
        return dict(found)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._running.append(asyncio.create_task(coroutine))

    async def _never_read(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", self._port))
        forged = f"10.1.{number // 256}.{number % 256}"
        body = completion(max_tokens=2000, stream=True)
        await loop.sock_sendall(sock, request(self._key, "/v1/completions", body, x_forwarded_for=forged))
        self._sockets.append(sock)

    async def _page(self, path: str) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.write(f"GET {path} HTTP/1.1\r\nhost: server\r\nconnection: close\r\n\r\n".encode())
                self.statuses[f"{path}: {await status_of(reader)}"] += 1
                await reader.read()
                writer.close()
            except (OSError, ValueError, IndexError) as error:
                self.statuses[f"{path}: {type(error).__name__}"] += 1
            await asyncio.sleep(0.05)

    async def _again(
        self, name: str, path: str, pause_s: float, body: bytes, headers: dict[str, str], *, reads: bool
    ) -> None:
        number = 0
        while True:
            number += 1
            forged = {"x_forwarded_for": f"10.2.{number // 256 % 256}.{number % 256}", **headers}
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.write(request(self._key, path, body, connection="close", **forged))
                self.statuses[f"{name}: {await status_of(reader)}"] += 1
                if reads:
                    await reader.read()
                if self.statuses["prompt logprobs: 200"]:
                    self._answered.set()
                writer.close()
            except (OSError, ValueError, IndexError) as error:
                self.statuses[f"{name}: {type(error).__name__}"] += 1
            await asyncio.sleep(pause_s)


async def main() -> None:
    """Commands in, answers out."""
    kind, port, key = sys.argv[1:]
    client: Any = {"polite": Polite, "hostile": Hostile}[kind](int(port), key)
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, *arguments = line.split()
        answer = await getattr(client, name)(*(int(argument) for argument in arguments))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


asyncio.run(main())
