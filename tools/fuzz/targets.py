"""All targets, each with its share of a run, and what must hold of the server at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import grpc
import httpx
from hypothesis import strategies as st

from ridgeline.contracts.handoff import KvLayout
from tools.fuzz import grpc_messages, http_bodies
from tools.fuzz.campaign import Campaign
from tools.fuzz.collective_messages import check_conversation, conversations
from tools.fuzz.server_process import ServerUnderTest
from tools.fuzz.transfer_frames import check_stream, streams

IDLE_S = 30.0
IDLE_SERIES = ("ridgeline_requests_in_flight ", "ridgeline_tasks{")


@dataclass(frozen=True)
class Target:
    """A campaign and its share of a run, from 0 to 1."""

    campaign: Campaign
    share: float


def in_process() -> list[Target]:
    """Return the targets that need no server."""
    return [
        Target(Campaign("transfer frames", streams(), check_stream), 0.54),
        Target(Campaign("collective messages", conversations(), check_conversation), 0.06),
    ]


@dataclass(frozen=True)
class Connected:
    """The targets of a running server, with the connections they use."""

    server: ServerUnderTest
    layout: KvLayout
    kv: grpc.Channel
    worker: grpc.Channel
    targets: list[Target]

    def require_unharmed(self) -> None:
        """Check that nothing is in flight and every kind of valid request is answered."""
        self.server.require_alive()
        deadline_s = time.monotonic() + IDLE_S
        while busy := _busy(self.server.url):
            assert time.monotonic() < deadline_s, f"left in flight: {busy}"
            time.sleep(0.1)
        grpc_messages.require_serving(self.kv, self.worker, self.layout)
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
            answer = http_bodies.exchange(self.server.port, http_bodies.valid_request(path))
            assert answer is not None, path
            assert answer.status == 200, (path, answer)


@contextmanager
def connected(server: ServerUnderTest) -> Iterator[Connected]:
    """Open the connections that the campaigns need."""
    layout = grpc_messages.layout_of(server.kv)
    with ExitStack() as stack:
        kv, decode, prefill = (
            stack.enter_context(grpc_messages.channel_to(address))
            for address in (server.kv, server.decode, server.prefill)
        )
        decode_tasks = stack.enter_context(closing(grpc_messages.Session(decode)))
        prefill_tasks = stack.enter_context(closing(grpc_messages.Session(prefill)))
        tasks = grpc_messages.tasks(layout)
        targets = [
            Target(_calls("KV source", server, kv, grpc_messages.kv_calls(layout)), 0.12),
            Target(_calls("worker", server, decode, grpc_messages.worker_calls()), 0.06),
            Target(Campaign("tasks at decode", tasks, grpc_messages.submit_check(decode_tasks)), 0.05),
            Target(Campaign("tasks at prefill", tasks, grpc_messages.submit_check(prefill_tasks)), 0.02),
            Target(_http(server), 0.13),
            *_openapi(server, 0.02),
        ]
        yield Connected(server, layout, kv, decode, targets)


def _calls(
    name: str, server: ServerUnderTest, channel: grpc.Channel, calls: st.SearchStrategy[grpc_messages.Call]
) -> Campaign:
    def check(call: grpc_messages.Call) -> None:
        code = grpc_messages.code_of(channel, call)
        if code is grpc.StatusCode.UNAVAILABLE:
            server.require_alive()
        grpc_messages.check_code(code, call)

    return Campaign(name, calls, check)


def _http(server: ServerUnderTest) -> Campaign:
    def check(request: http_bodies.RawRequest) -> None:
        try:
            answer = http_bodies.exchange(server.port, request)
        except ConnectionRefusedError:
            server.require_alive()
            raise
        assert answer is not None or not request.must_answer, "closed without an answer"
        http_bodies.check_answer(answer)

    return Campaign("HTTP", http_bodies.requests, check)


def _openapi(server: ServerUnderTest, share: float) -> list[Target]:
    """Return one campaign for all operations; it needs schemathesis, which only the development environment has."""
    assert find_spec("schemathesis"), "schemathesis is not installed: run `make setup`"
    from tools.fuzz.openapi_cases import case_check, strategies

    return [Target(Campaign("OpenAPI", st.one_of(*strategies(server.url)), case_check(server.url)), share)]


def _busy(url: str) -> list[str]:
    """Return the series that should be 0 but are not."""
    lines = httpx.get(f"{url}/metrics", timeout=IDLE_S, trust_env=False).raise_for_status().text.splitlines()
    return [line for line in lines if line.startswith(IDLE_SERIES) and float(line.rpartition(" ")[2])]
