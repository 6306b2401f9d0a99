"""Malformed gRPC: bytes for every method of a worker and of a KV source, and calls that are cancelled.

A message that cannot be read must be refused as the caller's fault; one that can be read must be answered. UNKNOWN
would mean an uncaught exception of ours, UNAVAILABLE a server that is gone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec
from hypothesis import strategies as st

from ridgeline.contracts.tasks import Adapter, GenerateTask, StepBatch, TokenDelta
from ridgeline.contracts.workers import (
    AbortRequest,
    Ack,
    AttachRequest,
    LoadAdapter,
    OfferRequest,
    PairRequest,
    UnloadAdapter,
    WorkerStatus,
)
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
_SAMPLING = {"temperature": 0.0, "max_tokens": 3, "seed": 1, "stop_token_ids": [7], "logit_bias": {5: 1.0}, "top_k": 3}
_LOGPROBS = {"logprobs": 2, "prompt_logprobs": 1, "min_tokens": 1, "bad_words": ["a"], "n": 2, "output_kind": 1}
_GRAMMAR = {"structured_outputs": {"json": {"type": "object"}}, "extra_args": {"kv_transfer_params": {}}}
_UNBOUNDED = {"max_tokens": None, "thinking_token_budget": 5, "repetition_penalty": 1.1, "allowed_token_ids": [1]}
_CONTINUED = {"emitted_token_ids": [8], "first_token": "resample", "cache_salt": "a", "reasoning_ended": True}


def builtins(message: msgspec.Struct) -> Any:
    """Return the message as the builtins that msgpack decodes."""
    return msgspec.msgpack.decode(_encode(message))


_TASK = GenerateTask(request_id="r", leg="prefill", prompt_token_ids=[5, 6, 7], sampling=b"")
_HANDOFF = builtins(make_handoff("h", num_tokens=3))
"""Valid, but never fetched."""


def _fetch(num_blocks: int) -> FetchRequest:
    """Return a valid request for the first blocks of the hand-off that is there."""
    return FetchRequest(
        handoff_id="open",
        runs=((0, num_blocks),),
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


def _calls(service: str, methods: dict[str, tuple[list[Any], bool, bool]]) -> st.SearchStrategy[Call]:
    """Return calls of these methods, of each its valid messages, whether it streams, and whether a call of it ends."""
    impatient = st.sampled_from(GIVE_UP_S)
    patient = st.one_of(st.none(), st.none(), st.none(), impatient)
    calls = [
        st.builds(
            Call, st.just(f"/{service}/{method}"), messages(valid), st.just(streams), patient if ends else impatient
        )
        for method, (valid, streams, ends) in methods.items()
    ]
    return st.one_of(calls)


_FETCHES = [builtins(_fetch(3)), builtins(msgspec.structs.replace(_fetch(3), part_start=512, part_bytes=512))]
KV_CALLS = _calls(
    grpc_methods.SERVICE,
    {
        grpc_methods.FETCH: (_FETCHES, True, True),
        grpc_methods.PIN: (_FETCHES, True, False),
        grpc_methods.RENEW: (["open", "unknown"], False, True),
        grpc_methods.RELEASE: ([builtins(grpc_methods.Release("unknown")), ["unknown", 1, 2]], False, True),
        grpc_methods.DESCRIBE: ([None], False, True),
    },
)
"""Calls of `ridgeline.KvTransfer`."""
_EMPTY = [builtins(Ack())]
_ADAPTER = Adapter(name="sql", digest="unknown", path="/none")
WORKER_CALLS = _calls(
    SERVICE,
    {
        **dict.fromkeys(("Describe", "Status", "ResetPrefixCache", "Nothing"), (_EMPTY, False, True)),
        "Pair": ([builtins(PairRequest(["127.0.0.1:1"])), builtins(PairRequest([], "grpc"))], False, True),
        "Offer": ([builtins(OfferRequest(_TASK))], False, True),
        "LoadAdapter": ([builtins(LoadAdapter(name="sql", path="/none"))], False, True),
        "UnloadAdapter": ([builtins(UnloadAdapter(adapter=_ADAPTER, after_s=1.0))], False, True),
        "Abort": ([builtins(AbortRequest(ROUTER, ["r", "s"]))], False, True),
        "Attach": ([builtins(AttachRequest("another"))], True, False),
    },
)
"""Calls of all methods of `ridgeline.Worker` except Submit, and of one that is not there."""


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


def answer_of(method: Any, message: bytes, timeout_s: float) -> tuple[grpc.StatusCode, Any]:
    """Make a call; return its status and its answer, a list if it streams."""
    try:
        answer = method(message, timeout=timeout_s)
        return Code.OK, answer if isinstance(answer, bytes) else list(answer)
    except grpc.RpcError as error:
        return error.code(), None


def code_of(channel: grpc.Channel, call: Call) -> grpc.StatusCode:
    """Make the call, read it to its end, and return its status."""
    method = channel.unary_stream(call.method) if call.streams else channel.unary_unary(call.method)
    return answer_of(method, call.message, call.give_up_s or DEADLINE_S)[0]


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

    def _ending(self) -> TokenDelta:
        """Return the last delta of the accepted task; there is one task at a time."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            delta = self._deltas.get(timeout=max(0.01, deadline_s - time.monotonic()))
            assert delta is not None, "the worker closed the session"
            if delta.finished:
                return delta

    def check_task(self, message: bytes) -> None:
        """Check that a task is refused, or ends with tokens or as invalid, never with an engine error."""
        code, reply = answer_of(self._channel.unary_unary(f"/{SERVICE}/Submit"), message, DEADLINE_S)
        if code is not Code.OK:
            assert code in REFUSALS, f"Submit ended with {code.name}"
            return
        ack = msgspec.msgpack.decode(reply, type=Ack)
        if not ack.accepted:
            assert ack.reason
            return
        ending = self._ending()
        assert ending.error_kind in ("", "invalid", "handoff"), f"{ending.error_kind}: {ending.error}"
        assert (ending.error is None) == (ending.error_kind == "")

    def close(self) -> None:
        """End the stream and its thread."""
        self._stream.cancel()
        self._thread.join(DEADLINE_S)


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
