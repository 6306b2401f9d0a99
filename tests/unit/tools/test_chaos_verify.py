"""The checker of the chaos run finds what it is there to find: a checker that has never failed shows nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tools.chaos import verify
from tools.chaos.records import Choice, Record, _take_event
from tools.chaos.wishes import COMPLETIONS, KINDS, Mix, Wish


def decode(token_ids: list[int]) -> str:
    return "".join(chr(96 + token_id) for token_id in token_ids)


def wish(kind: str = "plain", max_tokens: int = 3, num_choices: int = 1) -> Wish:
    return Wish(0, kind, COMPLETIONS, {"stream": True}, max_tokens, num_choices)


def good(**changes: Any) -> Record:
    record = Record(wish(), sent_s=0.0, status=200, dones=1, usage_tokens=3)
    record.choices[0] = Choice([1, 2, 3], "abc", ["length"])
    for name, value in changes.items():
        setattr(record, name, value)
    return record


def test_a_whole_answer_has_no_violation():
    assert verify.violations(good(), decode) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dones": 0}, "no ending"),
        ({"dones": 2, "after_end": 1}, "after [DONE]"),
        ({"broken": "ReadError: "}, "no ending: ReadError"),
        ({"errors": ["one", "two"]}, "2 errors"),
        ({"usage_tokens": 4}, "usage says 4"),
        ({"choices": {0: Choice([1, 2, 3], "abc", [])}}, "0 finish reasons"),
        ({"choices": {0: Choice([1, 2, 3], "abc", ["length", "stop"])}}, "2 finish reasons"),
        ({"choices": {0: Choice([1, 3], "ac", ["length"])}, "usage_tokens": 2}, "has 2 tokens"),
        ({"choices": {0: Choice([1, 2, 2, 3], "abbc", ["length"])}, "usage_tokens": 4}, "has 4 tokens"),
        ({"choices": {0: Choice([1, 2, 3], "ac", ["length"])}}, "text is not that of its tokens"),
        ({"choices": {}, "usage_tokens": 0}, "0 finish reasons"),
    ],
)
def test_each_loss_is_found(changes: dict[str, Any], says: str):
    found = verify.violations(good(**changes), decode)
    assert any(says in sentence for sentence in found), found


@pytest.mark.parametrize(
    ("rest", "is_text_of_tokens"),
    [("", True), ("\ufffd\ufffd", True), (" \ufffd", True), (" ", False), ("\ufffda", False)],
)
def test_only_a_token_that_ends_within_a_character_may_be_missing_from_the_text(rest: str, is_text_of_tokens: bool):
    found = verify.violations(good(), lambda _: f"abc{rest}")
    assert (not found) == is_text_of_tokens, found


@pytest.mark.parametrize(
    "changes",
    [
        {"left": True, "dones": 0, "usage_tokens": None},
        {"errors": ["a worker is gone"], "dones": 1},
        {"status": 429, "errors": ["try again later"], "dones": 0, "choices": {}},
    ],
)
def test_who_left_was_refused_or_was_told_of_an_error_has_lost_nothing(changes: dict[str, Any]):
    assert verify.violations(good(**changes), decode) == []


def test_endings_and_errors_are_counted_without_what_differs_from_one_to_the_next():
    records = [
        good(),
        good(left=True),
        good(broken="x"),
        good(errors=["the worker at 127.0.0.1:4711 broke"]),
        good(errors=["the worker at 127.0.0.1:4712 broke"]),
        good(status=503, errors=["not ready"]),
    ]
    assert verify.endings(records) == {"finished": 1, "left": 1, "lost": 1, "error": 2, "refused": 1}
    assert verify.errors_by_reason(records) == {"the worker at # broke": 2}
    assert verify.refusals_by_reason(records) == {"503 not ready": 1}


def test_the_pause_is_the_largest_gap_from_the_first_kill_in_mid_stream():
    through = good(token_times_s=[0.0, 1.0, 1.1, 4.1, 4.2])
    over_before = good(token_times_s=[0.0, 1.0])
    begun_after = good(token_times_s=[3.0, 9.0])
    assert verify.pauses_s([through, over_before, begun_after], kills_s=[2.0, 1.05]) == [pytest.approx(3.0)]


def test_a_stream_with_two_choices_an_error_and_late_events_is_recorded_as_it_came():
    record = Record(wish(num_choices=2), sent_s=0.0, status=200)
    _take_event(record, '{"choices": [{"index": 1, "text": "a", "token_ids": [1], "prompt_token_ids": [7]}]}')
    _take_event(record, '{"choices": [{"index": 0, "delta": {"content": "b"}, "token_ids": [2, 3]}]}')
    _take_event(record, '{"choices": [], "usage": {"completion_tokens": 3}}')
    _take_event(record, '{"error": {"message": "gone"}}')
    _take_event(record, "[DONE]")
    _take_event(record, '{"choices": []}')
    assert (record.num_tokens, record.usage_tokens, record.prompt_token_ids) == (3, 3, [7])
    assert (record.errors, record.dones, record.after_end) == (["gone"], 1, 1)


class Words:
    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))


def test_the_same_seed_wishes_the_same_in_any_order():
    mixes = [Mix(5, "model", range(5000), Words()) for _ in range(2)]
    numbers = list(range(200))
    forwards = [mixes[0].wish(number) for number in numbers]
    random.Random(1).shuffle(numbers)
    assert all(mixes[1].wish(number) == forwards[number] for number in numbers)
    assert {wish.kind for wish in forwards} == set(KINDS)
    lengths = [len(wish.body["prompt"]) for wish in forwards if "prompt" in wish.body]
    assert min(lengths) >= 5
    assert 300 < max(lengths) <= 1500
    assert any(wish.leave_after_tokens == 0 for wish in (mixes[0].wish(number) for number in range(2000)))
