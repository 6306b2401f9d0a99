"""Reads ShareGPT's conversations, a JSON array or JSON lines, which hold texts: lengths are a tokenizer's."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ridgeline.loadtest.errors import MALFORMED, TraceError
from ridgeline.loadtest.trace.prompts import load_tokenizer
from ridgeline.loadtest.trace.reading.request_table import (
    NO_TIMES,
    ReadRequest,
    RequestTable,
    checked_table,
    frame_of,
    poisson_arrivals,
)
from ridgeline.loadtest.trace.reading.trace_file import TraceFile

SPEAKERS = ({"human", "user"}, {"gpt", "assistant", "chatgpt", "bing", "bard"})
LEAST_TOKENS = 4
"""Of a prompt or an answer; shorter ones are left out, as `vllm bench serve` does."""
BATCH = 1000
UNREADABLE = "conversations that are not lists of messages with from and value"
NO_EXCHANGE = "conversations that do not begin with a question and its answer"
SHORT = f"questions or answers of fewer than {LEAST_TOKENS} tokens"
NO_LENGTHS = "holds texts without lengths: pass --tokenizer PATH, the served model's folder"
Exchange = tuple[str, str]


class _Message(msgspec.Struct):
    value: str
    speaker: str = msgspec.field(name="from")


class _Conversation(msgspec.Struct):
    conversations: list[_Message]


def read_sharegpt(file: TraceFile, tokenizer: str | None, most_rows: int) -> RequestTable:
    """Read the first exchange of each conversation, as `vllm bench serve` does. Raises LoadTestError."""
    if tokenizer is None:
        raise TraceError(f"{file.path} {NO_LENGTHS}")
    dropped: Counter[str] = Counter()
    exchanges = _exchanges(file, dropped)
    lengths = itertools.islice(_lengths(exchanges, tokenizer, dropped), most_rows)
    rows = [ReadRequest(0, arrival_s, *each) for each, arrival_s in zip(lengths, poisson_arrivals(), strict=False)]
    return checked_table(file, "ShareGPT JSON", frame_of(file, rows), dropped=dropped, notes=(NO_TIMES,))


def _exchanges(file: TraceFile, dropped: Counter[str]) -> Iterator[Exchange]:
    decoder = msgspec.json.Decoder(_Conversation)
    for _, one in file.raw_documents():
        try:
            messages = decoder.decode(one).conversations[:2]
        except MALFORMED:
            dropped[UNREADABLE] += 1
            continue
        speakers = [message.speaker for message in messages]
        if len(speakers) == 2 and all(who in known for who, known in zip(speakers, SPEAKERS, strict=True)):
            yield messages[0].value, messages[1].value
        else:
            dropped[NO_EXCHANGE] += 1


def _lengths(exchanges: Iterable[Exchange], tokenizer: str, dropped: Counter[str]) -> Iterator[tuple[int, int]]:
    """Yield the tokens of prompts and answers; in batches, so that a limit spares the tokenizer the rest."""
    waiting = iter(exchanges)
    while batch := list(itertools.islice(waiting, BATCH)):
        prompts, answers = (token_counts(tokenizer, texts) for texts in zip(*batch, strict=True))
        for lengths in zip(prompts, answers, strict=True):
            if min(lengths) >= LEAST_TOKENS:
                yield lengths
            else:
                dropped[SHORT] += 1


def token_counts(tokenizer: str, texts: Sequence[str]) -> list[int]:
    """Return the tokens of each text. Raises LoadTestError if the tokenizer cannot be loaded."""
    encoded = load_tokenizer(tokenizer).encode_batch(list(texts), add_special_tokens=False)
    return [len(each.ids) for each in encoded]
