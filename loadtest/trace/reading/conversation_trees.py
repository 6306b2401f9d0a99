"""Reads AIPerf's DAG JSONL: a conversation a line, whose turns begin other conversations and wait for them.

Format: `docs/benchmark-modes/dag.md` of ai-dynamo/aiperf (`dag_jsonl`). `forks` go on from the conversation so far,
`spawns` begin anew; the turn after a spawn, or turn `join_at`, waits for its children; `delay` is in ms. It holds
texts, so lengths are a tokenizer's, without the chat template. Orchestrators and `context_mode` are refused.
"""

from typing import Any

import msgspec

from ridgeline.loadtest.errors import TraceError
from ridgeline.loadtest.trace.reading.request_table import (
    NO_TIMES,
    ReadRequest,
    RequestTable,
    checked_table,
    frame_of,
    poisson_arrivals,
)
from ridgeline.loadtest.trace.reading.sharegpt import NO_LENGTHS, token_counts
from ridgeline.loadtest.trace.reading.trace_file import TraceFile

MOST_DEPTH = 100
"""Of conversations that begin one another."""


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        """What of it is text."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(str(part.get("text", "")) for part in self.content)


class _Fork(msgspec.Struct, forbid_unknown_fields=True):
    child: str
    background: bool = False


class _Spawn(msgspec.Struct, forbid_unknown_fields=True):
    children: list[str]
    join_at: int | None = None


class _Turn(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[_Message]
    max_tokens: int
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    extra: dict[str, Any] | None = None
    forks: list[str | _Fork] = []
    spawns: list[str | _Spawn] = []
    delay: float = 0.0


class _Conversation(msgspec.Struct, forbid_unknown_fields=True):
    session_id: str
    turns: list[_Turn]
    pre_session_spawns: list[str] = []


def read_conversation_trees(file: TraceFile, tokenizer: str | None, most_rows: int) -> RequestTable:
    """Read each tree of conversations as a session, each turn as one of its requests. Raises LoadTestError."""
    if tokenizer is None:
        raise TraceError(f"{file.path} {NO_LENGTHS}")
    trees = _Trees(file, tokenizer, most_rows)
    for root, arrival_s in zip(trees.roots, poisson_arrivals(), strict=False):
        if len(trees.found) >= most_rows:
            break
        trees.add(root, ReadRequest(0, arrival_s, 0, 0, session=root))
    return checked_table(file, "AIPerf DAG JSONL", frame_of(file, trees.found[:most_rows]), notes=(NO_TIMES,))


class _Trees:
    """The conversations of a file, and the requests that were made of them."""

    def __init__(self, file: TraceFile, tokenizer: str, most_rows: int) -> None:
        self._file, self._most_rows = file, most_rows
        self._conversations: dict[str, tuple[int, _Conversation]] = {}
        self.found: list[ReadRequest] = []
        children: set[str] = set()
        for number, each in file.documents(_Conversation):
            if each.session_id in self._conversations:
                raise TraceError(f"{file.where(number)}: session {each.session_id} is there twice: rename one")
            self._conversations[each.session_id] = number, each
            children.update(each.pre_session_spawns)
            for turn in each.turns:
                children.update(child for child, _ in (*_forks(turn), *_spawns(turn, 0)))
        self.roots = [name for name in self._conversations if name not in children]
        if not self.roots:
            raise TraceError(f"{file.path}: no conversation is a root: each is begun by another one")
        turns = [turn for _, each in self._conversations.values() for turn in each.turns]
        counts = token_counts(tokenizer, ["".join(message.text for message in turn.messages) for turn in turns])
        self._tokens = {id(turn): max(1, count) for turn, count in zip(turns, counts, strict=True)}

    def add(self, name: str, begun: ReadRequest, known_tokens: int = 0, depth: int = 0) -> list[int]:
        """Add the turns of a conversation and of all that it begins; return the places of those that end it.

        `begun` has what its requests have in common, and what the first is after; its first prompt begins with
        `known_tokens` of the conversation that it goes on from. Nothing waits for children in the background.
        Raises TraceError.
        """
        if len(self.found) >= self._most_rows:
            return list(begun.after)
        number, conversation = self._conversation(name, depth)
        where, last_turn = self._file.where(number), len(conversation.turns) - 1
        for child in conversation.pre_session_spawns:
            self.add(child, begun, 0, depth + 1)
        loose: list[int] = []
        joins: dict[int, list[int]] = {}
        request = begun._replace(line=number, fresh=not known_tokens)
        for index, turn in enumerate(conversation.turns):
            known_tokens += self._tokens[id(turn)]
            request = request._replace(
                input_tokens=known_tokens,
                output_tokens=turn.max_tokens,
                think_s=turn.delay / 1e3,
                after=(*request.after, *joins.get(index, ())),
            )
            place = len(self.found)
            self.found.append(request)
            known_tokens += turn.max_tokens
            request = request._replace(after=(place,), fresh=False)
            for child, background in _forks(turn):
                if index < last_turn and not background:
                    raise TraceError(f"{where}: turn {index} forks and is not the last: set background to true")
                ends = self.add(child, request, known_tokens, depth + 1)
                loose += [] if background else ends
            for child, join_at in _spawns(turn, index):
                if join_at <= index or (join_at > last_turn and join_at != index + 1):
                    raise TraceError(f"{where}: turn {index} joins at {join_at}: name a later turn")
                joins.setdefault(join_at, []).extend(self.add(child, request, 0, depth + 1))
        return [*request.after, *joins.get(last_turn + 1, ()), *loose]

    def _conversation(self, name: str, depth: int) -> tuple[int, _Conversation]:
        """Return a conversation and its line. Raises TraceError."""
        if name not in self._conversations:
            raise TraceError(f"{self._file.path}: a turn begins session {name!r}, which no line has: add it")
        number, conversation = self._conversations[name]
        where = self._file.where(number)
        if depth > MOST_DEPTH:
            raise TraceError(f"{where}: conversations begin one another over {MOST_DEPTH} times: do they in a circle?")
        if not conversation.turns or any(turn.max_tokens < 1 or turn.delay < 0 for turn in conversation.turns):
            raise TraceError(f"{where}: give at least one turn, max_tokens of 1 or more, and delays of 0 or more")
        return number, conversation


def _forks(turn: _Turn) -> list[tuple[str, bool]]:
    """Return each conversation that goes on from this turn, and whether this one goes on too."""
    return [(each, False) if isinstance(each, str) else (each.child, each.background) for each in turn.forks]


def _spawns(turn: _Turn, index: int) -> list[tuple[str, int]]:
    """Return each conversation that begins after this turn, and the turn that waits for it."""
    plain = [_Spawn([each]) if isinstance(each, str) else each for each in turn.spawns]
    return [(child, index + 1 if each.join_at is None else each.join_at) for each in plain for child in each.children]
