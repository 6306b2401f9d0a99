"""Reads conversations: sessions with think time, and ShareGPT's texts."""

import functools
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ridgeline.loadtest.errors import TraceError
from ridgeline.loadtest.trace.prompts import load_tokenizer
from ridgeline.loadtest.trace.trace import TraceRow

SPEAKERS = ({"human", "user"}, {"gpt", "assistant", "chatgpt", "bing", "bard"})
LEAST_TOKENS = 4
"""Of a prompt or an answer; shorter ones are left out, as `vllm bench serve` does."""


class _Turn(msgspec.Struct):
    session_id: str
    input_length: int
    output_length: int
    timestamp: float | None = None
    delay: float = 0.0


class _Message(msgspec.Struct):
    value: str
    speaker: str = msgspec.field(name="from")


class _Conversation(msgspec.Struct):
    conversations: list[_Message]


def session_rows(path: Path) -> Iterator[TraceRow]:
    """Read sessions as AIPerf writes them, a turn a line: `session_id`, and the tokens that the turn adds.

    The first turn has the `timestamp` at which the session begins, each other one the `delay` after the answer before
    it, both in milliseconds. A turn's prompt is the conversation so far, answers included, and its own tokens.
    """
    decoder = msgspec.json.Decoder(_Turn)
    last: dict[str, TraceRow] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                turn = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise TraceError(f"{where}: {error}") from error
            if turn.input_length < 1 or turn.output_length < 1 or turn.delay < 0:
                raise TraceError(
                    f"{where}: a turn adds at least 1 input and 1 output token, and its delay is 0 or more"
                )
            before = last.get(turn.session_id)
            if before is None and turn.timestamp is None:
                raise TraceError(f"{where}: the first turn of session {turn.session_id} needs a timestamp")
            history = before.input_tokens + before.output_tokens if before else 0
            row = TraceRow(
                arrival_s=before.arrival_s if before else (turn.timestamp or 0.0) / 1e3,
                input_tokens=history + turn.input_length,
                output_tokens=turn.output_length,
                session=turn.session_id,
                think_s=turn.delay / 1e3 if before else 0.0,
            )
            last[turn.session_id] = row
            yield row


def sharegpt_rows(path: Path, tokenizer: str | None) -> tuple[TraceRow, ...]:
    """Read the first exchange of each conversation, as `vllm bench serve` does, at Poisson arrivals of 1 request/s."""
    if tokenizer is None:
        raise TraceError(f"{path} holds texts without lengths: pass --tokenizer PATH, the served model's folder")
    arrivals = random.Random(0)
    arrival_s = 0.0
    rows: list[TraceRow] = []
    for input_tokens, output_tokens in _sharegpt_lengths(path, path.stat().st_mtime_ns, tokenizer):
        rows.append(TraceRow(arrival_s, input_tokens, output_tokens))
        arrival_s += arrivals.expovariate(1.0)
    return tuple(rows)


@functools.lru_cache(maxsize=2)
def _sharegpt_lengths(path: Path, _changed_ns: int, tokenizer: str) -> tuple[tuple[int, int], ...]:
    """Return prompt and answer tokens; a comparison asks for them once for each pair of rounds."""
    try:
        conversations = msgspec.json.decode(path.read_bytes(), type=list[_Conversation])
    except msgspec.DecodeError as error:
        raise TraceError(
            f"{path}: {error}; ShareGPT is a list of objects whose conversations have from and value"
        ) from error
    exchanges = [
        (first.value, second.value)
        for first, second in (each.conversations[:2] for each in conversations if len(each.conversations) >= 2)
        if first.speaker in SPEAKERS[0] and second.speaker in SPEAKERS[1]
    ]
    if not exchanges:
        return ()
    encode = load_tokenizer(tokenizer)
    tokens = [
        [len(ids) for ids in encode(list(texts), add_special_tokens=False, verbose=False)["input_ids"]]
        for texts in zip(*exchanges, strict=True)
    ]
    return tuple(sizes for sizes in zip(*tokens, strict=True) if min(sizes) >= LEAST_TOKENS)
