"""All campaigns, each with its share of a run, and what must hold of the server at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import grpc
import httpx
from hypothesis import strategies as st

from tools.child import Child
from tools.fuzz import grpc_messages, http_bodies
from tools.fuzz.campaign import Campaign
from tools.fuzz.grpc_messages import Call
from tools.fuzz.transfer_frames import check_stream, streams

IDLE_S = 30.0
IDLE_SERIES = ("ridgeline_requests_in_flight ", "ridgeline_tasks{")


def in_process() -> list[Campaign]:
    """Return the campaigns that need no server."""
    return [Campaign("transfer frames", 0.6, streams(), check_stream)]


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
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
            answer = http_bodies.exchange(_port(self.server), http_bodies.valid_request(path))
            assert answer is not None, path
            assert answer.status == 200, (path, answer)


@contextmanager
def connected(server: Child) -> Iterator[Connected]:
    """Open the connections that the campaigns need."""
    with ExitStack() as stack:
        kv, decode, prefill = (
            stack.enter_context(grpc_messages.channel_to(server.told[name])) for name in ("kv", "decode", "prefill")
        )
        decode_tasks = stack.enter_context(closing(grpc_messages.Session(decode)))
        prefill_tasks = stack.enter_context(closing(grpc_messages.Session(prefill)))
        submit, tasks = grpc_messages.submit_check, grpc_messages.tasks()
        campaigns = [
            _calls("KV source", 0.12, server, kv, grpc_messages.kv_calls()),
            _calls("worker", 0.06, server, decode, grpc_messages.worker_calls()),
            Campaign("tasks at decode", 0.05, tasks, submit(decode_tasks)),
            Campaign("tasks at prefill", 0.02, tasks, submit(prefill_tasks)),
            _http(0.13, server),
            _openapi(0.02, server),
        ]
        yield Connected(server, kv, decode, campaigns)


def _calls(name: str, share: float, server: Child, channel: grpc.Channel, calls: st.SearchStrategy[Call]) -> Campaign:
    def check(call: Call) -> None:
        code = grpc_messages.code_of(channel, call)
        if code is grpc.StatusCode.UNAVAILABLE:
            server.require_alive()
        grpc_messages.check_code(code, call)

    return Campaign(name, share, calls, check)


def _http(share: float, server: Child) -> Campaign:
    port = _port(server)

    def check(request: http_bodies.RawRequest) -> None:
        try:
            answer = http_bodies.exchange(port, request)
        except ConnectionRefusedError:
            server.require_alive()
            raise
        assert answer is not None or not request.must_answer, "closed without an answer"
        http_bodies.check_answer(answer)

    return Campaign("HTTP", share, http_bodies.requests, check)


def _openapi(share: float, server: Child) -> Campaign:
    """Return the campaign for all operations; it needs schemathesis, which only the development environment has."""
    assert find_spec("schemathesis"), "schemathesis is not installed: run `make setup`"
    from tools.fuzz.openapi_cases import case_check, strategies

    url = server.told["url"]
    return Campaign("OpenAPI", share, st.one_of(*strategies(url)), case_check(url))


def _port(server: Child) -> int:
    return int(server.told["url"].rpartition(":")[2])


def _busy(url: str) -> list[str]:
    """Return the series that should be 0 but are not."""
    lines = httpx.get(f"{url}/metrics", timeout=IDLE_S, trust_env=False).raise_for_status().text.splitlines()
    return [line for line in lines if line.startswith(IDLE_SERIES) and float(line.rpartition(" ")[2])]
