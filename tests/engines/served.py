"""A running server as a test sees it: its processes, what it says of its workers, and long streams from it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx
import psutil

from tests.engines.harness import Metrics
from tests.engines.serve_process import RIDGELINE, Serve, body, engines_below, name_of, serving, words_of
from tests.support.patience import PATIENCE_S

BACK_WITHIN_S = 300.0
"""Ends a test that would hang: an engine's start takes 10 to 60 s where nothing else runs."""
SMALL_SPLIT = {
    "model.dtype": "float32",  # texts are compared: in bfloat16 a batch of another size may break ties another way
    "ray.share_cores": "true",
    "model.max_model_len": "1024",
    **{f"pools.{pool}.kv_cache_memory_bytes": "128 MiB" for pool in ("prefill", "decode")},
    **{f"pools.{pool}.max_num_seqs": "8" for pool in ("prefill", "decode")},
    # An engine warms up with a full step, which takes seconds with the shipped size.
    **{f"pools.{pool}.max_num_batched_tokens": "128" for pool in ("prefill", "decode")},
}
"""More engines than cores, so only what happens counts, not how fast."""


class Deployed:
    """A running server and what can be done to its processes."""

    def __init__(self, serve: Serve, url: str) -> None:
        self.serve = serve
        self.url = url

    def workers(self) -> dict[str, dict[str, Any]]:
        rows = httpx.get(f"{self.url}/ridgeline/workers", timeout=30).json()["workers"]
        return {row["worker"]: row for row in rows}

    def engine(self, worker: str) -> psutil.Process:
        return engines_below(psutil.Process(self.workers()[worker]["pid"]))[0]

    def busy_decode(self) -> str:
        """The decode worker that has a request."""
        return next(row["worker"] for row in self.workers().values() if row["pool"] == "decode" and row["tasks"])

    def heads(self, title: str) -> list[psutil.Process]:
        """The processes of routers, or of the dispatcher."""
        return [p for p in self.serve.family() if name_of(p).startswith(f"ridgeline::{title}")]

    def router(self) -> psutil.Process:
        found = self.heads("router")
        assert len(found) == 1
        return found[0]

    def metrics(self) -> Metrics:
        return Metrics(httpx.get(f"{self.url}/metrics", timeout=30).text)

    def completes(self) -> None:
        for _ in range(4):  # more than one, so that more than one worker of a pool has its turn
            reply = httpx.post(f"{self.url}/v1/completions", json=body(3), timeout=120)
            assert reply.status_code == 200, reply.text
            assert reply.json()["usage"]["completion_tokens"] == 3

    def back(self, name: str) -> str:
        """Waits for it; the sentence is forgotten, so that the next one can be waited for."""
        line = self.serve.wait_said(f"{name}: back after", BACK_WITHIN_S)
        self.serve.lines.remove(line)
        return line


@contextmanager
def deployed_by_serve(
    *arguments: str, settings: Mapping[str, str], program: tuple[str, ...] = (str(RIDGELINE),)
) -> Iterator[Deployed]:
    """`ridgeline serve` with these settings, which has answered."""
    with serving(*arguments, *words_of(settings), program=program) as serve:
        deployed = Deployed(serve, serve.wait_ready())
        deployed.completes()
        yield deployed


class Stream:
    """A long answer, read in the background."""

    def __init__(self, url: str, num_tokens: int = 900, **fields: Any) -> None:
        self.lines: list[str] = []
        self.times_s: list[float] = []
        self._request = {**body(num_tokens), "stream": True, "stream_options": {"include_usage": True}, **fields}
        self._thread = threading.Thread(target=self._read, args=(url,), daemon=True)
        self._thread.start()
        deadline_s = time.monotonic() + PATIENCE_S
        while len(self.lines) < 3:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    def _read(self, url: str) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=self._request, timeout=120) as response:
                for line in filter(None, response.iter_lines()):
                    self.times_s.append(time.monotonic())
                    self.lines.append(line)
        except httpx.TransportError as error:
            self.lines.append(f"broken: {type(error).__name__}")

    def end(self) -> list[str]:
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self.lines

    def events(self) -> list[dict[str, Any]]:
        """All of them, once it has ended."""
        return [json.loads(line.removeprefix("data: ")) for line in self.end() if line != "data: [DONE]"]

    def text(self) -> str:
        """The whole answer, once it has ended."""
        return "".join(choice["text"] for event in self.events() for choice in event["choices"])

    def gaps_s(self, since_s: float) -> list[float]:
        """The gaps between events that ended after this moment."""
        return [later - earlier for earlier, later in pairwise(self.times_s) if later > since_s]
