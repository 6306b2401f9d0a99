"""Reads WEKA's agentic traces: a conversation of a coding agent in each JSON object, with hashes of its blocks."""

from collections.abc import Iterator

import msgspec

from ridgeline.loadtest.errors import TraceError
from ridgeline.loadtest.trace.reading.json_documents import documents
from ridgeline.loadtest.trace.reading.request_table import (
    HashNumbers,
    ReadRequest,
    RequestTable,
    checked_table,
    frame_of,
)
from ridgeline.loadtest.trace.reading.trace_file import TraceFile

USUAL_BLOCK_TOKENS = 64
LOCAL = "local"
"""The scope of hashes that mean something in their own conversation only."""


class _Call(msgspec.Struct):
    """A call of a model, or of a subagent that makes calls of its own."""

    t: float
    kind: str = msgspec.field(name="type", default="n")
    inputs: int = msgspec.field(name="in", default=0)
    outputs: int = msgspec.field(name="out", default=0)
    hash_ids: tuple[int | str, ...] | None = None
    requests: "list[_Call]" = []


class _AgentTrace(msgspec.Struct):
    requests: list[_Call]
    id: str | int = ""
    block_size: int = USUAL_BLOCK_TOKENS
    hash_id_scope: str = LOCAL


def read_agent_traces(file: TraceFile, most_rows: int) -> RequestTable:
    """Read each call as a request at its time; all conversations begin at once. Raises TraceError."""
    numbers = HashNumbers()
    found: list[ReadRequest] = []
    conversations, block_sizes = 0, set()
    for number, each in documents(file, _AgentTrace):
        if each.block_size < 1:
            raise TraceError(f"{file.where(number)}: block_size is {each.block_size}: a block has 1 token or more")
        conversations += 1
        block_sizes.add(each.block_size)
        scope = (each.id, number) if each.hash_id_scope == LOCAL else ()
        for call, at_s in _calls(each.requests, 0.0):
            hashes = numbers.numbered((*scope, block) for block in call.hash_ids or ())
            found.append(ReadRequest(number, at_s, call.inputs, call.outputs, hashes))
        if len(found) >= most_rows:
            break
    if len(block_sizes) > 1:
        raise TraceError(
            f"{file.path}: conversations with blocks of {', '.join(map(str, sorted(block_sizes)))} tokens: "
            "put those of each size in a file of their own"
        )
    note = f"{conversations} conversations, which all begin at once: their times count from their own starts"
    notes = (note,) if conversations > 1 else ()
    block_tokens = block_sizes.pop() if block_sizes else USUAL_BLOCK_TOKENS
    return checked_table(
        file, "WEKA agentic JSON", frame_of(file, found[:most_rows]), block_tokens=block_tokens, notes=notes
    )


def _calls(calls: list[_Call], began_s: float) -> Iterator[tuple[_Call, float]]:
    """Yield each call with its time. A subagent's times count from its own start, or from the conversation's.

    Both are written; times below that of the subagent's start can only be the first.
    """
    for call in calls:
        at_s = began_s + call.t
        if call.kind != "subagent":
            yield call, at_s
        elif call.requests:
            is_relative = min(each.t for each in call.requests) < call.t
            yield from _calls(call.requests, at_s if is_relative else began_s)
