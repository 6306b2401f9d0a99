"""Reads ShareGPT's conversations, a JSON array or JSON lines, which hold texts: lengths are a tokenizer's."""

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from ridgeline.loadtest.errors import MALFORMED, TraceError
from ridgeline.loadtest.trace.prompts import load_tokenizer
from ridgeline.loadtest.trace.reading.json_documents import objects
from ridgeline.loadtest.trace.reading.request_table import ReadRequest, RequestTable, checked_table, frame_of
from ridgeline.loadtest.trace.reading.trace_file import TraceFile

SPEAKERS = ({"human", "user"}, {"gpt", "assistant", "chatgpt", "bing", "bard"})
LEAST_TOKENS = 4
"""Of a prompt or an answer; shorter ones are left out, as `vllm bench serve` does."""
BATCH = 1000
UNREADABLE = "conversations that are not lists of messages with from and value"
NO_EXCHANGE = "conversations that do not begin with a question and its answer"
SHORT = f"questions or answers of fewer than {LEAST_TOKENS} tokens"
NO_TIMES = "first exchanges of conversations, which have no times: Poisson arrivals of 1 request/s"
Exchange = tuple[str, str]


class _Message(msgspec.Struct):
    value: str
    speaker: str = msgspec.field(name="from")


class _Conversation(msgspec.Struct):
    conversations: list[_Message]


def read_sharegpt(file: TraceFile, tokenizer: str | None, most_rows: int) -> RequestTable:
    """Read the first exchange of each conversation, as `vllm bench serve` does. Raises LoadTestError."""
    if tokenizer is None:
        raise TraceError(f"{file.path} holds texts without lengths: pass --tokenizer PATH, the served model's folder")
    dropped: Counter[str] = Counter()
    exchanges = _exchanges(file, dropped)
    arrivals = random.Random(0)
    arrival_s = 0.0
    rows: list[ReadRequest] = []
    for lengths in itertools.islice(_lengths(exchanges, tokenizer, dropped), most_rows):
        rows.append(ReadRequest(0, arrival_s, *lengths))
        arrival_s += arrivals.expovariate(1.0)
    return checked_table(file, "ShareGPT JSON", frame_of(file, rows), dropped=dropped, notes=(NO_TIMES,))


def _exchanges(file: TraceFile, dropped: Counter[str]) -> Iterator[Exchange]:
    decoder = msgspec.json.Decoder(_Conversation)
    for one in _conversations(file):
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


def _conversations(file: TraceFile) -> Iterable[bytes | str | msgspec.Raw]:
    if file.is_one_document:
        return (part for _, part in objects(file))
    return (line for _, line in file.numbered_lines())


def _lengths(exchanges: Iterable[Exchange], tokenizer: str, dropped: Counter[str]) -> Iterator[tuple[int, int]]:
    """Yield the tokens of prompts and answers; in batches, so that a limit spares the tokenizer the rest."""
    waiting = iter(exchanges)
    while batch := list(itertools.islice(waiting, BATCH)):
        encode = load_tokenizer(tokenizer).encode_batch
        prompts, answers = (
            [len(each.ids) for each in encode(list(texts), add_special_tokens=False)]
            for texts in zip(*batch, strict=True)
        )
        for lengths in zip(prompts, answers, strict=True):
            if min(lengths) >= LEAST_TOKENS:
                yield lengths
            else:
                dropped[SHORT] += 1
