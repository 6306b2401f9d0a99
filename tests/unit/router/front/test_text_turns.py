"""Turns of streams: order, slices of time, several tokens at once when they are late, and failures of one alone."""

import asyncio
import logging

import pytest

from ridgeline.router.front.text_turns import EVENTS_LOOKED_AT, SLICE_S, TOLD_EVERY_S, TextTurns
from tests.support.clock import FakeClock
from tests.support.symptoms import is_quoted


class Stream:
    """Notes how many of its tokens were there at each of its turns, each of which takes a while."""

    def __init__(self, name, said, clock, takes_s=0.0):
        self.name, self._said, self._clock, self._takes_s = name, said, clock, takes_s
        self._tokens = 0

    def take(self, turns, tokens=1):
        self._tokens += tokens
        turns.add(self.make_text, tokens)

    def make_text(self):
        self._said.append((self.name, self._tokens))
        self._tokens = 0
        self._clock.now_s += self._takes_s


def made(takes_s=0.0, streams=3):
    clock, said = FakeClock(0.0), []
    return TextTurns(clock), [Stream(name, said, clock, takes_s) for name in range(streams)], said


def series(turns):
    return {family.name: family.samples[0].value for family in turns.collect()}


async def test_a_router_that_keeps_up_makes_an_event_of_each_token_in_the_order_in_which_they_came():
    turns, streams, said = made()
    for _ in range(2):
        for stream in streams:
            stream.take(turns)
        await asyncio.sleep(0)
    assert said == [(0, 1), (1, 1), (2, 1)] * 2
    assert series(turns) == {
        "ridgeline_text_tokens": 6,
        "ridgeline_text_events": 6,
        "ridgeline_text_seconds": 0,
        "ridgeline_text_wait_seconds": 0,
    }


async def test_the_time_from_a_token_to_its_text_is_added_up_over_events():
    turns, streams, _ = made(takes_s=SLICE_S)
    for stream in streams:
        stream.take(turns)
    for _ in streams:
        await asyncio.sleep(0)
    assert series(turns)["ridgeline_text_seconds"] == pytest.approx(SLICE_S * (1 + 2 + 3))


async def test_a_router_that_is_behind_reads_on_and_makes_one_event_of_what_has_come_meanwhile():
    turns, streams, said = made(takes_s=SLICE_S)
    for _ in range(3):  # each time the loop turns, a token of every stream has come, and there is time for one of them
        for stream in streams:
            stream.take(turns)
        await asyncio.sleep(0)
    assert said == [(0, 1), (1, 2), (2, 3)]
    for _ in range(2):
        await asyncio.sleep(0)
    assert said[3:] == [(0, 2), (1, 1)]
    assert series(turns)["ridgeline_text_events"] == 5


async def test_a_router_that_has_to_wait_for_its_core_still_makes_text_in_each_turn_of_the_loop():
    turns, streams, said = made()
    clock = turns._clock

    def interrupted():
        clock.now_s += SLICE_S
        return clock.now_s

    turns._clock = interrupted
    for _ in range(2):
        streams[0].take(turns)
        await asyncio.sleep(0)
    assert said == [(0, 1)] * 2


async def test_how_far_it_is_behind_is_the_wait_of_the_oldest_token():
    turns, streams, said = made(takes_s=SLICE_S)
    for stream in streams:
        stream.take(turns)
    await asyncio.sleep(0)
    assert series(turns)["ridgeline_text_wait_seconds"] == SLICE_S
    turns.leave(streams[1].make_text)
    turns.leave(streams[1].make_text)
    turns.leave(streams[2].make_text)
    assert turns.behind_s == 0.0
    await asyncio.sleep(0)
    assert said == [(0, 1)], "who leaves has no turn"
    streams[1].take(turns)
    await asyncio.sleep(0)
    assert said == [(0, 1), (1, 2)], "who comes again has one"


async def test_a_router_whose_tokens_are_late_says_that_it_is_the_bottleneck_and_logs_it_now_and_then(caplog):
    turns, (stream, *_), _ = made()
    clock = stream._clock

    async def a_while(events, tokens_each):
        for _ in range(events):
            stream.take(turns, tokens_each)
            await asyncio.sleep(0)
        turns.look()

    with caplog.at_level(logging.WARNING):
        await a_while(EVENTS_LOOKED_AT, 1)
        assert turns.late == "", "it keeps up"
        await a_while(EVENTS_LOOKED_AT // 2, 3)
        assert turns.late == "", "hardly anything was sent"
        for _ in range(2):
            await a_while(EVENTS_LOOKED_AT, 3)
            assert "it sends 3.0 tokens in each event, 300 tokens/s in all; add one to router.processes" in turns.late
            assert is_quoted(turns.late)
        clock.now_s += TOLD_EVERY_S
        await a_while(EVENTS_LOOKED_AT, 3)
    assert len(caplog.records) == 2
    await a_while(EVENTS_LOOKED_AT, 1)
    assert turns.late == ""
