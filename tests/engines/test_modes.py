"""The mode of a deployment changes while its engines serve: nothing fails, and no token differs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from ridgeline.router.scheduler.offline_simulation import recorded
from ridgeline.router.scheduler.recorded_events import read_recording
from ridgeline.router.scheduler.replay import replay
from tests.engines.harness import Engines, Figure, Increase
from tests.support.patience import eventually

pytestmark = [pytest.mark.engines, pytest.mark.core, pytest.mark.asyncio(loop_scope="session")]

CHANGES = ("colocated", "adaptive")
"""From disaggregated, to which the fixture goes back."""
PER_CHANGE = 3
"""Answers between two changes."""
CLIENTS = 4
OUTPUT_TOKENS = 8
LONG_PROMPT_TOKENS = 600
"""More than a step of prefill (512), less than one of a replica (2048)."""


@pytest_asyncio.fixture(loop_scope="session")
async def changing(engines: Engines) -> AsyncIterator[Engines]:
    """The deployment, in mode disaggregated again afterwards."""
    yield engines
    await change(engines, "disaggregated")


async def change(engines: Engines, mode: str) -> dict[str, object]:
    response = await engines.http.post("/ridgeline/mode", json={"mode": mode})
    assert response.status_code == 200, response.text
    answer: dict[str, object] = response.json()
    return answer


@pytest.mark.proves("greedy answers, whole and streamed", ("disaggregated", *CHANGES))
async def test_the_mode_changes_under_load_and_nothing_fails_and_every_token_is_the_models(
    changing: Engines, text: list[int], figure: Figure
):
    engines = changing
    before, answers, took = await engines.metrics(), [], []
    moved, stop = asyncio.Condition(), asyncio.Event()

    async def client(number: int) -> None:
        asked = 0
        while not stop.is_set():
            begin, length = 300 * (CLIENTS * asked + number), 40 + 60 * ((asked + number) % 4)
            prompt = text[begin : begin + length]
            answer = await engines.tokens(prompt, OUTPUT_TOKENS)
            async with moved:
                answers.append((prompt, answer))
                moved.notify_all()
            asked += 1

    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(number))
        for mode in CHANGES:
            async with moved:
                enough = len(answers) + PER_CHANGE
                await moved.wait_for(lambda enough=enough: len(answers) >= enough)
            began_s = time.monotonic()
            assert (await change(engines, mode))["mode"] == mode
            took.append(time.monotonic() - began_s)
        async with moved:
            enough = len(answers) + PER_CHANGE
            await moved.wait_for(lambda: len(answers) >= enough)
        stop.set()
    figure(
        f"{len(CHANGES)} changes under {CLIENTS} clients, the longest took {max(took) * 1000:.0f} ms; "
        f"{len(answers)} answers"
    )
    counted = Increase(before, await engines.metrics())
    paths = counted.by_label("ridgeline_requests_total", "path")
    assert paths["colocated"] > 0
    assert paths["disaggregated"] > 0
    assert counted.sum("ridgeline_decisions_total") > 0, "workers were chosen by prediction"
    assert counted.sum("ridgeline_requests_total", outcome="finished") == len(answers)
    assert counted.sum("ridgeline_retries_total") == 0
    for prompt, answer in answers:
        assert all(engines.is_tie(nat) for nat in await engines.behind_best_nats(prompt, answer))
    assert await engines.becomes_idle() == {}


async def test_the_limits_of_a_step_change_while_the_engine_serves(changing: Engines, text: list[int]):
    steps = {}
    for mode in ("disaggregated", "colocated"):
        await change(changing, mode)
        await changing.cold()
        before = await changing.metrics()
        await changing.tokens(text[7_000 : 7_000 + LONG_PROMPT_TOKENS], 1)
        steps[mode] = Increase(before, await changing.metrics()).sum("ridgeline_steps_total")
    assert steps == {"disaggregated": 2, "colocated": 1}


async def test_a_server_says_which_modes_it_can_serve_and_refuses_others(changing: Engines):
    told = (await changing.http.get("/ridgeline/mode")).json()
    assert told == {"mode": "disaggregated", "modes": ["disaggregated", "colocated", "adaptive"], "why_not": {}}
    assert (await changing.http.post("/ridgeline/mode", json={"mode": "mixed"})).status_code in (400, 422)


async def test_in_mode_adaptive_answers_within_limits_are_the_models_whole_or_split(
    changing: Engines, text: list[int], figure: Figure
):
    engines = changing
    await change(engines, "adaptive")
    limits = {"x-ridgeline-ttft-ms": "60000", "x-ridgeline-tpot-ms": "2000"}
    prompts = [text[11_000 + 400 * number : 11_120 + 400 * number] for number in range(5)]
    began = asyncio.Event()

    async def ask(prompt: list[int], tokens: int = 12) -> list[int]:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer: list[int] = []
        async for _, event in engines.stream("/v1/completions", body, {**limits, "x-request-id": f"mine-{prompt[0]}"}):
            answer += event["choices"][0]["token_ids"]
            began.set()
        return answer

    start, number = await engines.metrics(), 0
    while not Increase(start, await engines.metrics()).sum("ridgeline_decisions_total"):  # until steps are known
        await ask(text[20_000 + 100 * number : 20_040 + 100 * number])
        number += 1
        assert number < 30, "no worker reports a model of its steps"
    lines: list[bytes] = []

    async def record() -> None:
        async with engines.http.stream("GET", "/ridgeline/record", params={"seconds": 600}, timeout=None) as response:
            async for some in response.aiter_bytes():
                lines.append(some)  # noqa: PERF401 - others look at it meanwhile

    recording = asyncio.create_task(record())
    await eventually(lambda: lines)
    before = await engines.metrics()
    began.clear()
    first = asyncio.create_task(ask(prompts[0], 40))
    await began.wait()
    answers = [*await asyncio.gather(*map(ask, prompts[1:])), await first]
    counted = Increase(before, await engines.metrics())
    choices = counted.by_label("ridgeline_decisions_total", "choice")
    figure(f"an answer of 40 tokens, and 4 of 12 that come while it is made: {choices}")
    assert sum(choices.values()) == len(prompts)  # which are split depends on how fast this machine's steps are
    explained = (await engines.http.get("/ridgeline/decisions", params={"last": len(prompts)})).json()["decisions"]
    assert sorted(one["request_id"] for one in explained) == sorted(f"cmpl-mine-{prompt[0]}-0" for prompt in prompts)
    assert all((one["ttft_limit_s"], one["tpot_limit_s"], one["placements"]) == (60, 2, 1) for one in explained)
    assert all(one["ttft_s"] < 60 and one["decision"]["predicted_ttft_s"] < 60 for one in explained)
    await eventually(lambda: b"".join(lines).count(b'"type":"answered"') == len(prompts))
    recording.cancel()
    await asyncio.wait((recording,))
    events = [*read_recording(b"".join(lines).splitlines(keepends=True), "it")]
    made = replay(events)
    assert (made.placements, made.differences) == (len(prompts), [])
    known = recorded(events)
    assert sorted(one.output_tokens for one in known.requests) == [12, 12, 12, 12, 40]
    assert all(one.in_time for one in known.requests)
    for prompt, answer in zip([*prompts[1:], prompts[0]], answers, strict=True):
        assert all(engines.is_tie(nat) for nat in await engines.behind_best_nats(prompt, answer))
    assert await engines.becomes_idle() == {}
