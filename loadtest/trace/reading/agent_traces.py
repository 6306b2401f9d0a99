"""Reads WEKA's agentic traces: a conversation of a coding agent in each JSON object, with hashes of its blocks.

Format: `docs/trace_replay_tester.md` of callanjfox/kv-cache-tester, and `docs/tutorials/weka-trace.md` of
ai-dynamo/aiperf. As both replay it: the calls of an agent follow one another; a subagent begins after the call before
it, beside others that do; the agent's next call waits for all of them.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial

import msgspec

from ridgeline.loadtest.errors import TraceError
from ridgeline.loadtest.trace.reading.request_table import (
    NO_TIMES,
    HashNumbers,
    ReadRequest,
    RequestTable,
    checked_table,
    frame_of,
    poisson_arrivals,
)
from ridgeline.loadtest.trace.reading.trace_file import TraceFile

USUAL_BLOCK_TOKENS = 64
LOCAL = "local"
"""The scope of hashes that mean something in their own conversation only."""
EMPTY = "calls of 0 tokens, so they had failed when recorded"


class _Call(msgspec.Struct):
    """A call of a model at `t` seconds, or a subagent that makes calls of its own."""

    t: float
    kind: str = msgspec.field(name="type", default="n")
    inputs: int = msgspec.field(name="in", default=0)
    outputs: int = msgspec.field(name="out", default=0)
    hash_ids: tuple[int | str, ...] | None = None
    api_time: float | None = None
    """Seconds that the answer took."""
    think_time: float | None = None
    """Seconds that the client waited before it, such as for a tool."""
    requests: "list[_Call]" = []


class _AgentTrace(msgspec.Struct):
    requests: list[_Call]
    id: str | int = ""
    block_size: int = USUAL_BLOCK_TOKENS
    hash_id_scope: str = LOCAL


def read_agent_traces(file: TraceFile, most_rows: int) -> RequestTable:
    """Read each conversation as a session, each call as one of its requests. Raises TraceError."""
    numbers = HashNumbers()
    found: list[ReadRequest] = []
    dropped: Counter[str] = Counter()
    block_sizes = set()
    for (number, each), arrival_s in zip(file.documents(_AgentTrace), poisson_arrivals(), strict=False):
        if each.block_size < 1:
            raise TraceError(f"{file.where(number)}: block_size is {each.block_size}: a block has 1 token or more")
        block_sizes.add(each.block_size)
        scope = (each.id, number, arrival_s) if each.hash_id_scope == LOCAL else ()
        began = ReadRequest(number, arrival_s, 0, 0, session=f"{each.id}, line {number}, {arrival_s}")
        dropped[EMPTY] += _empty(each.requests)
        _add_calls(found, each.requests, began, partial(_numbered, numbers, scope))
        if len(found) >= most_rows:
            break
    if len(block_sizes) > 1:
        raise TraceError(
            f"{file.path}: conversations with blocks of {', '.join(map(str, sorted(block_sizes)))} tokens: "
            "put those of each size in a file of their own"
        )
    block_tokens = block_sizes.pop() if block_sizes else USUAL_BLOCK_TOKENS
    rows = frame_of(file, found[:most_rows])
    return checked_table(file, "WEKA agentic JSON", rows, block_tokens=block_tokens, dropped=dropped, notes=(NO_TIMES,))


def _numbered(numbers: HashNumbers, scope: tuple[object, ...], hashes: tuple[int | str, ...]) -> tuple[int, ...]:
    return numbers.numbered((*scope, block) for block in hashes)


def _add_calls(
    found: list[ReadRequest],
    calls: list[_Call],
    began: ReadRequest,
    numbered: Callable[[tuple[int | str, ...]], tuple[int, ...]],
    spawner: int | None = None,
) -> list[int]:
    """Add the calls of an agent that begins after the request `spawner`; return those that end it."""
    last, ended_s = spawner, None
    joined: list[int] = []
    for call in calls:
        if call.kind == "subagent":
            joined += _add_calls(found, call.requests, began, numbered, last)
            continue
        if min(call.inputs, call.outputs) < 1:
            continue
        waited_s = 0.0 if ended_s is None or joined else call.t - ended_s
        found.append(
            began._replace(
                input_tokens=call.inputs,
                output_tokens=call.outputs,
                prefix_ids=numbered(call.hash_ids or ()),
                think_s=max(0.0, waited_s if call.think_time is None else call.think_time),
                after=(*(() if last is None else (last,)), *joined),
                fresh=call.hash_ids is not None or last is spawner,
            )
        )
        last, joined, ended_s = len(found) - 1, [], call.t + (call.api_time or 0.0)
    return joined + ([last] if last is not None and last != spawner else [])


def _empty(calls: list[_Call]) -> int:
    """Count the calls of 0 tokens, of subagents too."""
    return sum(
        _empty(call.requests) if call.kind == "subagent" else min(call.inputs, call.outputs) < 1 for call in calls
    )
