"""What must hold for every answer, as pure functions of records."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable

from tools.chaos.records import Choice, Record

Decode = Callable[[list[int]], str]
"""Decodes token ids to text, as the server's tokenizer does."""
NOT_YET_A_CHARACTER = "\ufffd"


def violations(record: Record, decode: Decode) -> list[str]:
    """Return a sentence for each thing that is wrong. An error reported to the client is not one: see `endings`."""
    found = list(_of_ending(record))
    if record.refused or record.broken or record.errors or record.left:
        return found
    found += _of_counts(record)
    for index, choice in sorted(record.choices.items()):
        found += [f"choice {index}: {sentence}" for sentence in _of_text(record, choice, decode)]
    return found


def _of_ending(record: Record) -> Iterable[str]:
    """Check for exactly one ending: a finish reason for each choice and one [DONE], or one error."""
    if record.broken:
        yield f"no ending: {record.broken}"
        return
    if record.left:
        return
    if record.after_end:
        yield f"{record.after_end} events after [DONE]"
    if len(record.errors) > 1:
        yield f"{len(record.errors)} errors: {record.errors}"
    if record.errors:
        return
    if record.dones != 1:
        yield f"no ending: the stream closed with {record.dones} [DONE] and no error"
    for index in range(record.wish.num_choices):
        reasons = record.choices.get(index, Choice()).finish_reasons
        if len(reasons) != 1:
            yield f"choice {index} has {len(reasons)} finish reasons: {reasons}"


def _of_counts(record: Record) -> Iterable[str]:
    wish = record.wish
    if record.usage_tokens != record.num_tokens:
        yield f"usage says {record.usage_tokens} tokens, {record.num_tokens} came"
    for index, choice in sorted(record.choices.items()):
        count = len(choice.token_ids)
        if count > wish.max_tokens or (wish.whole_length and count != wish.max_tokens):
            yield f"choice {index} has {count} tokens, max_tokens is {wish.max_tokens} (kind {wish.kind})"


def _of_text(record: Record, choice: Choice, decode: Decode) -> Iterable[str]:
    kind = record.wish.kind
    if kind == "stop":
        return
    whole = decode(choice.token_ids)
    # vLLM holds back the text of a token that ends within a character, with the space that such a token may begin with.
    rest = whole.removeprefix(choice.text)
    is_held_back = rest.endswith(NOT_YET_A_CHARACTER) and not rest.strip(f" {NOT_YET_A_CHARACTER}")
    if not whole.startswith(choice.text) or (rest and not is_held_back):
        yield f"the text is not that of its tokens: {choice.text[-60:]!r} against {whole[-60:]!r}"
    if kind == "json" and choice.finish_reasons == ["stop"]:
        try:
            json.loads(choice.text)
        except ValueError:
            yield f"not JSON: {choice.text!r}"


def endings(records: Iterable[Record]) -> Counter[str]:
    """Count requests by how they ended."""
    return Counter(_ending(record) for record in records)


def _ending(record: Record) -> str:
    if record.broken:
        return "lost"
    if record.refused:
        return "refused"
    if record.left:
        return "left"
    return "error" if record.errors else "finished"


def errors_by_reason(records: Iterable[Record]) -> Counter[str]:
    """Count the errors of accepted requests, without their particulars (ids, ports, times)."""
    return Counter(_without_particulars(error) for record in records if not record.refused for error in record.errors)


def refusals_by_reason(records: Iterable[Record]) -> Counter[str]:
    """Count the messages of 429 and 503."""
    refused = [record for record in records if record.refused]
    return Counter(f"{record.status} {_without_particulars(error)}" for record in refused for error in record.errors)


def _without_particulars(sentence: str) -> str:
    return re.sub(r"\b(?=\w*\d)[\w.:-]*\d[\w-]*", "#", sentence)[:160]


def pauses_s(records: Iterable[Record], kills_s: Iterable[float]) -> list[float]:
    """Return, for each stream alive at a kill, its largest gap between tokens after the first such kill, in seconds."""
    moments_s = sorted(kills_s)
    found = []
    for record in records:
        gaps_s = (record.gap_after_s(moment_s) for moment_s in moments_s)
        first = next((gap_s for gap_s in gaps_s if gap_s is not None), None)
        if first is not None:
            found.append(first)
    return sorted(found)
