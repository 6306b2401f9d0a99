"""Malformed gRPC: bytes for every method of a worker and of a KV source, and calls that are cancelled.

A message that cannot be read must be refused as the caller's fault; one that can be read must be answered. UNKNOWN
would mean an uncaught exception of ours, UNAVAILABLE a server that is gone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec
from hypothesis import strategies as st

from ridgeline.contracts.tasks import StepBatch, TokenDelta
from ridgeline.contracts.workers import AbortRequest, Ack, AttachRequest, PairRequest, WorkerStatus
from ridgeline.kv_transfer.interfaces import FetchRequest, SourceDescription
from ridgeline.kv_transfer.wire import grpc_methods
from ridgeline.worker_runtime.client import OPTIONS, SERVICE
from tests.support.samples import LAYOUT, make_handoff
from tools.fuzz.damage import messages

DEADLINE_S = 120.0
GIVE_UP_S = (0.0005, 0.003, 0.02)
ROUTER = "fuzzer"
Code = grpc.StatusCode
REFUSALS = {Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.NOT_FOUND, Code.RESOURCE_EXHAUSTED}
"""RESOURCE_EXHAUSTED is gRPC's refusal of a message that is too large, and a busy source's of another stream."""
GIVEN_UP = {Code.DEADLINE_EXCEEDED, Code.CANCELLED}

_encode = msgspec.msgpack.Encoder().encode
_ADDRESS = ["127.0.0.1:1"]
_SAMPLING = {"temperature": 0.0, "max_tokens": 3, "seed": 1, "stop_token_ids": [7], "logit_bias": {5: 1.0}, "top_k": 3}
_LOGPROBS = {"logprobs": 2, "prompt_logprobs": 1, "min_tokens": 1, "bad_words": ["a"], "n": 2, "output_kind": 1}
_GRAMMAR = {"structured_outputs": {"json": {"type": "object"}}, "extra_args": {"kv_transfer_params": {}}}
_UNBOUNDED = {"max_tokens": None, "thinking_token_budget": 5, "repetition_penalty": 1.1, "allowed_token_ids": [1]}
_CONTINUED = {"emitted_token_ids": [8], "first_token": "resample", "cache_salt": "a", "reasoning_ended": True}


def builtins(message: msgspec.Struct) -> Any:
    """Return the message as the builtins that msgpack decodes."""
    return msgspec.msgpack.decode(_encode(message))


_HANDOFF = builtins(make_handoff("h", num_tokens=3))
"""Valid, but never fetched."""


def _fetch(num_blocks: int) -> FetchRequest:
    """Return a valid request for the first blocks of the hand-off that is there."""
    return FetchRequest(
        handoff_id="open",
        first_block=0,
        num_blocks=num_blocks,
        layout=LAYOUT,
        part_start=0,
        part_bytes=LAYOUT.block_bytes,
    )


@dataclass(frozen=True)
class Call:
    """One call of one method. Its caller gives up after `give_up_s`; None: it waits for the end."""

    method: str
    message: bytes
    streams: bool
    give_up_s: float | None = None


def _calls(
    service: str, method: str, examples: st.SearchStrategy[bytes], *, streams: bool, waits: bool
) -> st.SearchStrategy[Call]:
    impatient = st.sampled_from(GIVE_UP_S)
    patience = st.one_of(st.none(), st.none(), st.none(), impatient) if waits else impatient
    return st.builds(Call, st.just(f"/{service}/{method}"), examples, st.just(streams), patience)


def kv_calls() -> st.SearchStrategy[Call]:
    """Return calls of `ridgeline.KvTransfer`."""
    request = _fetch(num_blocks=3)
    fetches = [builtins(request)]
    fetches.append(builtins(msgspec.structs.replace(request, part_start=512, part_bytes=512)))
    releases = [builtins(grpc_methods.Release("unknown")), ["unknown", 1, 2]]
    service = grpc_methods.SERVICE
    return st.one_of(
        _calls(service, grpc_methods.FETCH, messages(fetches), streams=True, waits=True),
        _calls(service, grpc_methods.PIN, messages(fetches), streams=True, waits=False),
        _calls(service, grpc_methods.RENEW, messages(["open", "unknown"]), streams=False, waits=True),
        _calls(service, grpc_methods.RELEASE, messages(releases), streams=False, waits=True),
        _calls(service, grpc_methods.DESCRIBE, messages([None]), streams=False, waits=True),
    )


def worker_calls() -> st.SearchStrategy[Call]:
    """Return calls of all methods of `ridgeline.Worker` except Submit."""
    attach, abort = builtins(AttachRequest("another")), builtins(AbortRequest(ROUTER, ["r", "s"]))
    pair = [builtins(PairRequest(_ADDRESS)), builtins(PairRequest([], "grpc"))]
    empty = messages([builtins(Ack())])
    return st.one_of(
        _calls(SERVICE, "Describe", empty, streams=False, waits=True),
        _calls(SERVICE, "Status", empty, streams=False, waits=True),
        _calls(SERVICE, "ResetPrefixCache", empty, streams=False, waits=True),
        _calls(SERVICE, "Pair", messages(pair), streams=False, waits=True),
        _calls(SERVICE, "Abort", messages([abort]), streams=False, waits=True),
        _calls(SERVICE, "Attach", messages([attach]), streams=True, waits=False),
        _calls(SERVICE, "Nothing", empty, streams=False, waits=True),
    )


@st.composite
def tasks(draw: st.DrawFn) -> bytes:
    """Draw a message for Submit: a task that is damaged, or whose sampling parameters are."""
    task = {
        "request_id": "r",
        "leg": draw(st.sampled_from(["prefill", "decode", "decode"])),
        "prompt_token_ids": [5, 6, 7],
        "sampling": draw(messages([draw(st.sampled_from([_SAMPLING, _LOGPROBS, _GRAMMAR, _UNBOUNDED]))])),
        **draw(st.sampled_from([{}, _CONTINUED, {"handoff": _HANDOFF}, {"recompute_reason": "short_prompt"}])),
    }
    submit = {"router_id": ROUTER, "task": task}
    if draw(st.integers(0, 2)) == 0:
        return draw(messages([submit]))
    return _encode(submit)


@contextmanager
def channel_to(address: str) -> Iterator[grpc.Channel]:
    """Open one connection for a whole campaign."""
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        grpc.channel_ready_future(channel).result(DEADLINE_S)
        yield channel


def code_of(channel: grpc.Channel, call: Call) -> grpc.StatusCode:
    """Make the call, read it to its end, and return its status."""
    timeout_s = call.give_up_s or DEADLINE_S
    try:
        if call.streams:
            for _ in channel.unary_stream(call.method)(call.message, timeout=timeout_s):
                pass
        else:
            channel.unary_unary(call.method)(call.message, timeout=timeout_s)
    except grpc.RpcError as error:
        return error.code()
    return Code.OK


def check_code(code: grpc.StatusCode, call: Call) -> None:
    """Check that the call was answered, refused as the caller's fault, or given up by the caller."""
    allowed = {Code.UNIMPLEMENTED} if call.method.endswith("Nothing") else {Code.OK} | REFUSALS
    if call.give_up_s is not None:
        allowed |= GIVEN_UP
    assert code in allowed, f"{call.method} ended with {code.name}"


class Session:
    """A router's stream of deltas, read on its own thread, which tells how tasks end."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._deltas: queue.Queue[TokenDelta | None] = queue.Queue()
        self._attached = threading.Event()
        method = channel.unary_stream(f"/{SERVICE}/Attach")
        self._stream = method(_encode(AttachRequest(ROUTER)))
        self._thread = threading.Thread(target=self._read, name="fuzz-deltas", daemon=True)
        self._thread.start()
        assert self._attached.wait(DEADLINE_S), "the worker does not greet"

    def _read(self) -> None:
        try:
            with suppress(grpc.RpcError):
                for data in self._stream:
                    self._attached.set()
                    for delta in msgspec.msgpack.decode(data, type=StepBatch).deltas:
                        self._deltas.put(delta)
        finally:
            self._deltas.put(None)  # so that nothing waits for a delta that cannot come

    def submit(self, message: bytes) -> Ack | grpc.StatusCode:
        """Submit a task; return the worker's answer, or the status of its refusal."""
        try:
            reply = self._channel.unary_unary(f"/{SERVICE}/Submit")(message, timeout=DEADLINE_S)
        except grpc.RpcError as error:
            return error.code()
        return msgspec.msgpack.decode(reply, type=Ack)

    def ending(self) -> TokenDelta:
        """Return the last delta of the accepted task; there is one task at a time."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            delta = self._deltas.get(timeout=max(0.01, deadline_s - time.monotonic()))
            assert delta is not None, "the worker closed the session"
            if delta.finished:
                return delta

    def close(self) -> None:
        """End the stream and its thread."""
        self._stream.cancel()
        self._thread.join(DEADLINE_S)


def submit_check(session: Session) -> Callable[[bytes], None]:
    """Return a check that an accepted task ends with tokens or as invalid, never with an engine error."""

    def check(message: bytes) -> None:
        ack = session.submit(message)
        if isinstance(ack, grpc.StatusCode):
            assert ack in REFUSALS, f"Submit ended with {ack.name}"
            return
        if not ack.accepted:
            assert ack.reason
            return
        ending = session.ending()
        assert ending.error_kind in ("", "invalid", "handoff"), f"{ending.error_kind}: {ending.error}"
        assert (ending.error is None) == (ending.error_kind == "")

    return check


def require_serving(kv: grpc.Channel, worker: grpc.Channel) -> None:
    """Check at the end that a valid fetch brings all frames and the worker reports its status."""
    request = _fetch(num_blocks=8)
    frames = list(kv.unary_stream(f"/{grpc_methods.SERVICE}/Fetch")(_encode(request), timeout=DEADLINE_S))
    assert sum(len(frame) for frame in frames) > 8 * LAYOUT.num_layers * LAYOUT.block_bytes
    told = kv.unary_unary(f"/{grpc_methods.SERVICE}/Describe")(b"", timeout=DEADLINE_S)
    description = msgspec.msgpack.decode(told, type=SourceDescription)
    assert description.open_leases == 2
    status = worker.unary_unary(f"/{SERVICE}/Status")(_encode(Ack()), timeout=DEADLINE_S)
    assert msgspec.msgpack.decode(status, type=WorkerStatus).tasks == 0
