"""All campaigns, each with its share of a run, how one runs, and what must hold of the server at the end.

Hypothesis remembers every example of a test, so that no two are alike. A long run is therefore many tests of
`BATCH_EXAMPLES` each: memory stays flat, progress can be shown, and a batch can be repeated by its seed alone.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import hypothesis
import psutil
import requests
from hypothesis import strategies as st

from tools.child import Child
from tools.fuzz import grpc_messages, http_requests
from tools.fuzz.http_requests import DEADLINE_S, Answer, check_answer, exchange
from tools.fuzz.transfer_frames import check_stream, streams

BATCH_EXAMPLES = 500
MEBIBYTE = 1 << 20
ENDLESS = ("/ridgeline/state/stream", "/ridgeline/record")
"""Streams that a caller has to leave."""
IDLE_S = 30.0
DRIVEN = ("/ridgeline/scale", "/ridgeline/restart")
"""What a driver carries out; the server under test has none."""
IDLE_SERIES = ("ridgeline_requests_in_flight ", "ridgeline_tasks{")


@dataclass(frozen=True)
class Footprint:
    """The resources of a process; a leak shows in one of the three."""

    rss_bytes: int
    threads: int
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Measure a process. Raises psutil.NoSuchProcess if it has ended."""
        process = psutil.Process(pid)
        return cls(process.memory_info().rss, process.num_threads(), process.num_fds())

    def __str__(self) -> str:
        return f"{self.rss_bytes / MEBIBYTE:.0f} MiB, {self.threads} threads, {self.descriptors} descriptors"


@dataclass(frozen=True)
class Campaign:
    """One kind of input: how to generate it, and the check for each, which raises AssertionError if it fails."""

    name: str
    share: float
    """Of the examples of a long run, from 0 to 1."""
    examples: st.SearchStrategy[Any]
    check: Callable[[Any], None]

    def run(self, examples: int, seed: int, on_batch: Callable[[int], None] = lambda _: None) -> int:
        """Check this many examples; fail at the first bad one with the smallest input that shows the failure.

        Returns how many were checked, a few more or fewer than asked for; tells that to `on_batch` after each batch.
        """
        checked = batch = 0

        def check(example: Any) -> None:
            nonlocal checked
            checked += 1
            self.check(example)

        while checked < examples:
            settings = hypothesis.settings(
                max_examples=min(BATCH_EXAMPLES, examples - checked),
                database=None,
                deadline=None,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            test = settings(hypothesis.given(example=self.examples)(check))
            try:
                hypothesis.seed(zlib.crc32(f"{self.name} {seed} {batch}".encode()))(test)()
            except BaseException as error:
                error.add_note(f"in batch {batch} of '{self.name}', SEED={seed}")
                raise
            batch += 1
            on_batch(checked)
        return checked


IN_PROCESS = [
    Campaign("transfer frames", 0.6, streams(), check_stream),
]
"""The campaigns that need no server."""


@dataclass(frozen=True)
class Connected:
    """The campaigns against a running server, with the connections they use."""

    server: Child
    kv: grpc.Channel
    worker: grpc.Channel
    campaigns: list[Campaign]

    def require_unharmed(self) -> None:
        """Check that nothing is in flight and every kind of valid request is answered."""
        self.server.require_alive()
        deadline_s = time.monotonic() + IDLE_S
        while busy := _busy(self.server.told["url"]):
            assert time.monotonic() < deadline_s, f"left in flight: {busy}"
            time.sleep(0.1)
        grpc_messages.require_serving(self.kv, self.worker)
        for path in http_requests.MOST_USED:
            answer = exchange(_port(self.server), http_requests.valid_request(path))
            assert answer is not None, path
            assert answer.status == 200, (path, answer)


@contextmanager
def connected(server: Child) -> Iterator[Connected]:
    """Open the connections that the campaigns need."""
    with ExitStack() as stack:
        kv, decode, prefill = (
            stack.enter_context(grpc_messages.channel_to(server.told[name])) for name in ("kv", "decode", "prefill")
        )
        sessions = [stack.enter_context(closing(grpc_messages.Session(worker))) for worker in (decode, prefill)]
        campaigns = [
            _calls("KV source", 0.12, server, kv, grpc_messages.KV_CALLS),
            _calls("worker", 0.06, server, decode, grpc_messages.WORKER_CALLS),
            Campaign("tasks at decode", 0.05, grpc_messages.tasks(), sessions[0].check_task),
            Campaign("tasks at prefill", 0.02, grpc_messages.tasks(), sessions[1].check_task),
            _http(0.13, server),
            _openapi(0.02, server.told["url"]),
        ]
        yield Connected(server, kv, decode, campaigns)


def _calls(
    name: str, share: float, server: Child, channel: grpc.Channel, calls: st.SearchStrategy[grpc_messages.Call]
) -> Campaign:
    def check(call: grpc_messages.Call) -> None:
        code = grpc_messages.code_of(channel, call)
        if code is grpc.StatusCode.UNAVAILABLE:
            server.require_alive()
        grpc_messages.check_code(code, call)

    return Campaign(name, share, calls, check)


def _http(share: float, server: Child) -> Campaign:
    def check(request: http_requests.RawRequest) -> None:
        try:
            answer = exchange(_port(server), request)
        except ConnectionRefusedError:
            server.require_alive()
            raise
        assert answer is not None or not request.must_answer, "closed without an answer"
        check_answer(answer)

    return Campaign("HTTP", share, http_requests.raw_requests, check)


def _openapi(share: float, url: str) -> Campaign:
    """Return the campaign of schemathesis, from the server's own document: some conform to it, more do not."""
    import schemathesis  # takes seconds

    document = httpx.get(f"{url}/openapi.json", timeout=DEADLINE_S, trust_env=False).raise_for_status().json()
    schema = schemathesis.openapi.from_dict(document).exclude(path=[*DRIVEN, *ENDLESS])
    negative = schemathesis.GenerationMode.NEGATIVE
    cases = [schema.as_strategy(), *[schema.as_strategy(generation_mode=negative)] * 2]
    session = requests.Session()
    session.trust_env = False  # no proxy of the shell

    def check(case: Any) -> None:
        response = case.call(base_url=url, session=session, timeout=DEADLINE_S)
        try:
            check_answer(Answer(response.status_code, response.headers.get("content-type", [""])[0], response.content))
        except AssertionError as error:
            error.add_note(case.as_curl_command())
            raise

    return Campaign("OpenAPI", share, st.one_of(cases), check)


def _port(server: Child) -> int:
    return int(server.told["url"].rpartition(":")[2])


def _busy(url: str) -> list[str]:
    """Return the series that should be 0 but are not."""
    lines = httpx.get(f"{url}/metrics", timeout=IDLE_S, trust_env=False).raise_for_status().text.splitlines()
    return [line for line in lines if line.startswith(IDLE_SERIES) and float(line.rpartition(" ")[2])]
