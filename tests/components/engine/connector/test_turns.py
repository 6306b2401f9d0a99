"""A later turn's prefill fetches what decode's prefix cache still has: two real schedulers, real transfers, no weights.

The model hashes what it reads (`tests/support/hashing_model.py`), so a wrong block changes every later token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.components.engine.connector.test_groups import CASES, Pair

# isort: split
from ridgeline.contracts.handoff import TransferResult, new_handoff_id
from ridgeline.engine.connector import scheduler_side
from ridgeline.engine.connector.groups import CacheGroups
from tests.support.hashing_model import HashingEngine
from tests.support.patience import PATIENCE_S

TURNS = 4


def reusing(offer: dict[str, Any]) -> dict[str, Any]:
    """What a prefill worker tells its engine."""
    return {"do_remote_prefill": True, "handoff": offer, "reuses_cached_kv": True}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    """Make engines of a case of `test_groups`."""
    made: list[Pair] = []

    def make_pair(case: str, transport: str = "shm", **decode: Any) -> Pair:
        made.append(Pair(tmp_path, CASES[case], transport, **decode))
        return made[-1]

    yield make_pair
    for one in made:
        one.prefill.close()
        one.decode.close()


class Conversation:
    """Turns of one conversation; each is prefilled after asking decode what it has of it."""

    def __init__(self, pair: Pair, first_tokens: int, answer_tokens: int = 140) -> None:
        self.pair = pair
        self.tokens = pair.tokens(first_tokens)
        pair.answer_tokens = answer_tokens
        self.results: list[TransferResult | None] = []
        """What came of each turn's fetch; None without one."""
        self.wrong: list[int] = []
        """Turns whose answer was not that of one engine alone."""

    def ask(self, offer: dict[str, Any] | None) -> tuple[list[int], dict[str, Any]]:
        """Prefill; return the first token and the hand-off."""
        engine, transfer = self.pair.prefill, {} if offer is None else reusing(offer)
        name = engine.add(self.tokens, 1, do_remote_decode=True, handoff_id=new_handoff_id(), **transfer)
        first = engine.answer(name, self.pair.decode)
        told = engine.finished[name]
        self.results.append(TransferResult(**told["result"]) if "result" in told else None)
        engine.step()
        return first, told["handoff"]

    def turn(self, offer: dict[str, Any] | None) -> None:
        """One question and its answer, to which the next question is added."""
        first, handoff = self.ask(offer)
        rest = self.pair.begin(self.tokens + first, handoff, self.pair.answer_tokens - 1)
        answer = first + self.pair.decode.answer(rest, self.pair.prefill)
        if answer != self.pair.expected(self.tokens):
            self.wrong.append(len(self.results))
        self.tokens = self.tokens + answer + self.pair.tokens(11)

    def next_turn(self) -> None:
        self.turn(self.pair.decode.offer(self.tokens))


def settled(*engines: HashingEngine) -> bool:
    """Whether all engines come to hold nothing: no request, no lease, no block that cannot be evicted."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        for engine in engines:
            engine.step()
        if not any(engine.scheduler.has_requests() or engine.open_leases for engine in engines):
            return all(engine.scheduler.reset_prefix_cache() for engine in engines)
    return False


@pytest.mark.parametrize(
    ("case", "transport"), [*((case, "shm") for case in CASES), ("dense", "grpc"), ("all three", "grpc")]
)
def test_later_turns_have_the_answer_of_one_engine_alone_and_leave_nothing(make, case, transport):
    engines = make(case, transport)
    conversations = [Conversation(engines, tokens) for tokens in (1, 130)]
    for _ in range(TURNS):
        for one in conversations:
            one.next_turn()
    assert [one.wrong for one in conversations] == [[], []]
    for one in conversations:
        assert [result and result.outcome for result in one.results] == [None, *["ok"] * (TURNS - 1)]
        assert all(result.num_tokens > 0 for result in one.results[1:])
    assert engines.prefill.recomputes == engines.decode.recomputes == {}
    assert settled(engines.prefill, engines.decode)


def begun(engines: Pair) -> Conversation:
    """A conversation after its first turn."""
    one = Conversation(engines, 300)
    one.next_turn()
    return one


@pytest.mark.parametrize("case", ["dense", "gemma3", "hybrid"])
def test_a_block_in_the_wrong_place_shows(make, case, monkeypatch):
    listed = CacheGroups.listed
    one = begun(make(case))
    monkeypatch.setattr(CacheGroups, "listed", lambda *args: listed(*args)[::-1])
    offer = one.pair.decode.offer(one.tokens)
    monkeypatch.undo()
    one.turn(offer)
    assert one.wrong == [2]


@pytest.mark.parametrize("case", ["dense", "gemma3", "hybrid"])
def test_after_a_lease_that_has_run_out_prefill_computes_the_turn(make, case, monkeypatch):
    one = begun(make(case))
    monkeypatch.setattr(scheduler_side, "OFFER_LEASE_S", 0.05)
    offer = one.pair.decode.offer(one.tokens)
    one.pair.decode.step()
    time.sleep(0.1)
    one.turn(offer)
    assert (one.wrong, [result and result.reason for result in one.results]) == ([], [None, "lease_expired"])
    assert one.pair.prefill.recomputes == {}, "it does its own work"
    assert settled(one.pair.prefill, one.pair.decode)


@pytest.mark.parametrize("case", ["dense", "gemma3", "hybrid"])
def test_a_decode_worker_that_is_lost_costs_the_turn_only_its_prefill(make, case):
    one = begun(make(case, transport="grpc"))
    offer = one.pair.decode.offer(one.tokens)
    one.pair.decode.close()
    first, _ = one.ask(offer)
    assert first == one.pair.expected(one.tokens)[:1]
    assert [result and result.reason for result in one.results] == [None, "unreachable"]


@pytest.mark.parametrize("case", ["dense", "gemma3", "hybrid"])
def test_what_decode_has_evicted_is_not_offered_and_what_is_offered_is_not_evicted(make, case):
    engines = make(case, num_blocks=100)
    one = begun(engines)
    offer = engines.decode.offer(one.tokens)
    others = [engines.tokens(600) for _ in range(4)]
    assert [engines.handed_over(prompt) for prompt in others] == [engines.expected(prompt) for prompt in others]
    one.turn(offer)
    assert (one.wrong, [result and result.outcome for result in one.results]) == ([], [None, "ok"])
    for prompt in others:
        engines.handed_over([*prompt[::-1]])
    left = engines.decode.offer(one.tokens)
    assert left is None or left["num_tokens"] < offer["num_tokens"]
    one.turn(left)
    assert one.wrong == []
    assert settled(engines.prefill, engines.decode)


def test_nothing_is_offered_of_another_salt_or_adapter_or_of_an_engine_without_prefix_caching(make):
    one = begun(make("dense"))
    assert one.pair.decode.offer(one.tokens, cache_salt="another client's") is None
    assert one.pair.decode.offer(one.tokens, lora=("sql@1", 1, "/sql")) is None
    assert one.pair.decode.offer(one.tokens[:1]) is None
    uncached = begun(make("dense", prefix_caching=False))
    assert uncached.pair.decode.offer(uncached.tokens) is None
    assert settled(one.pair.prefill, one.pair.decode)


def test_an_offer_that_nobody_reads_ends_with_its_lease(make, monkeypatch):
    one = begun(make("dense"))
    monkeypatch.setattr(scheduler_side, "OFFER_LEASE_S", 0.05)
    assert one.pair.decode.offer(one.tokens) is not None
    assert settled(one.pair.prefill, one.pair.decode)


def test_an_offer_leaves_the_sequences_that_run_half_of_the_free_blocks(make):
    engines = make("dense", num_blocks=30)
    one = begun(engines)
    held = engines.decode.add(engines.tokens(300), 2)
    engines.decode.step()
    assert engines.decode.offer(one.tokens) is None
    engines.decode.answer(held)
    assert settled(engines.prefill, engines.decode)


def test_what_prefill_has_itself_is_not_fetched(make):
    one = begun(make("dense"))
    offer = one.pair.decode.offer(one.tokens)
    one.pair.prefill.answer(one.pair.prefill.add(one.tokens, 1))
    one.turn(offer)
    assert (one.wrong, one.results) == ([], [None, None])
    assert settled(one.pair.prefill, one.pair.decode)


@pytest.mark.parametrize("case", ["dense", "gemma3", "hybrid"])
def test_what_a_step_in_flight_writes_is_not_read_before_it_ends(make, case, monkeypatch):
    engines = make(case)
    prompt, forward, offers = engines.tokens(224), HashingEngine._forward, []

    def offered_meanwhile(engine: HashingEngine, request: Any, start: int, end: int) -> int:
        if engine is engines.decode and end == len(prompt):
            offers.append((engine.offer([*prompt, 1]), engine.open_leases))
        return forward(engine, request, start, end)

    monkeypatch.setattr(HashingEngine, "_forward", offered_meanwhile)
    engines.decode.answer(engines.decode.add(prompt, 1))
    monkeypatch.undo()
    [(offer, open_leases)] = offers
    assert open_leases == 0
    name = engines.prefill.add([*prompt, 1], 1, **reusing(offer))
    engines.answer_tokens = 1
    assert engines.prefill.answer(name, engines.decode) == engines.expected([*prompt, 1])
    assert TransferResult(**engines.prefill.finished[name]["result"]).num_tokens == 224


@pytest.mark.parametrize("case", ["dense", "gemma3", "hybrid"])
def test_a_turn_whose_last_token_decode_computes_again_is_right_too(make, case):
    engines = make(case)
    one = begun(engines)
    prompt = one.tokens[:417]  # without its last token it ends with a block, all of which decode has
    name = engines.prefill.add(
        prompt[:-1], 1, do_remote_decode=True, handoff_id=new_handoff_id(), **reusing(engines.decode.offer(prompt))
    )
    engines.prefill.answer(name, engines.decode)
    engines.prefill.step()
    again = engines.begin(prompt, engines.prefill.finished[name]["handoff"], 6)
    engines.answer_tokens = 6
    assert engines.decode.answer(again, engines.prefill) == engines.expected(prompt)
    assert settled(engines.prefill, engines.decode)
