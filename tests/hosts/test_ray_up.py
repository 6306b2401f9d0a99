"""The commands of docs/how-to/deploy.md on three hosts, then what a cluster meets: a host cut off, lost, the end.

The tests stand in the order in which they run, since the last ones take hosts away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from statistics import median
from typing import Any

import httpx
import pytest
import pytest_asyncio

from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.doctor.checks import resolve_dtype
from ridgeline.cluster.model_store import DEFAULT_MODEL_NAME, prepare_model
from tests.engines.conftest import book
from tests.engines.harness import Engines, Figure, Increase, connected
from tests.hosts.conftest import Cluster, wait_until
from tests.support.patience import eventually

pytestmark = [pytest.mark.engines, pytest.mark.hosts]
on_the_sessions_loop = pytest.mark.asyncio(loop_scope="session")

NUM_REQUESTS, NUM_OUTPUT_TOKENS = 12, 6
LONG_OUTPUT_TOKENS = 150
TOKENS_BEFORE_FAULT = 10
CUT_S = 10.0
PAUSE_S = 15.0
"""A stream's longest gap if its decode host vanishes: 5 s until its silence is noticed, then the prompt once more."""
NOTICED_S, PROMPT_STEPS = 5.0, 40
"""On a slow machine that prompt, of 200 tokens, takes as long as so many of the stream's own steps."""
GONE_WITHIN_S = 30.0


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def both(cluster: Cluster) -> AsyncIterator[tuple[Engines, Engines]]:
    """The workers, reached past the router too; decode's engine judges answers, in the second one prefill's."""
    from transformers import AutoTokenizer

    path = prepare_model(DEFAULT_MODEL_NAME)
    model = (cluster.url, DEFAULT_MODEL_NAME, resolve_dtype(RidgelineConfig()), str(path))
    tokenizer = AutoTokenizer.from_pretrained(path)
    async with (
        connected(cluster.worker_addresses) as (prefill, decode),
        httpx.AsyncClient(base_url=cluster.url, timeout=120) as http,
    ):
        yield (
            Engines(*model, tokenizer, http, [prefill, decode]),
            Engines(*model, tokenizer, http, [decode, prefill]),
        )


@pytest.fixture
def engines(both: tuple[Engines, Engines]) -> Engines:
    """One engine on each host."""
    return both[0]


@pytest.fixture
def judged_by_prefill(both: tuple[Engines, Engines]) -> Engines:
    """The same, for when the decode host is gone."""
    return both[1]


@pytest.fixture
def text(engines: Engines) -> list[int]:
    """Tokens of a whole book, to cut prompts from."""
    return book(engines)


async def wrong_tokens_nat(engines: Engines, prompt: list[int], token_ids: list[int]) -> list[float]:
    """How far behind one engine's best token those are that differ from it by more than a tie."""
    return [nat for nat in await engines.behind_best_nats(prompt, token_ids) if not engines.is_tie(nat)]


async def streamed(engines: Engines, prompt: list[int], num_tokens: int, came_s: list[float]) -> list[int]:
    """The token ids of one greedy stream; `came_s` gets the moment of each."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    token_ids: list[int] = []
    async for at_s, event in engines.stream("/v1/completions", {**body, "return_token_ids": True}):
        new = [token for choice in event["choices"] for token in choice.get("token_ids") or []]
        came_s += [at_s] * len(new)
        token_ids += new
    return token_ids


async def with_fault(engines: Engines, prompt: list[int], fault: Any) -> tuple[list[int], float, float]:
    """Tokens of a long stream in whose middle `fault` is awaited, its longest gap and how long that may be, in s."""
    came_s: list[float] = []
    stream = asyncio.create_task(streamed(engines, prompt, LONG_OUTPUT_TOKENS, came_s))
    while len(came_s) < TOKENS_BEFORE_FAULT and not stream.done():  # noqa: ASYNC110 - a list has no event
        await asyncio.sleep(0.02)
    assert not stream.done(), "the answer was over before the fault"
    await fault()
    token_ids = await stream
    gaps_s = [later - earlier for earlier, later in pairwise(came_s)]
    return token_ids, max(gaps_s), max(PAUSE_S, NOTICED_S + PROMPT_STEPS * median(gaps_s))


def test_ray_up_starts_every_host_and_the_service_spans_them(cluster: Cluster, figure: Figure):
    figure(", ".join(f"{command}: {seconds:.0f} s" for command, seconds in cluster.took_s.items()))
    nodes = cluster.on_head("ray status")
    assert "3 local.cluster.node" in nodes, "the head and both workers, started by Ray itself"
    assert f"checking {cluster.prefill.address}, {cluster.decode.address}" in cluster.output
    told = " ".join(cluster.output.split())
    assert "KV goes by grpc" in told
    assert "not shm: it is on another host" in told
    assert any("EngineCore" in line or "engine" in line for line in cluster.decode.processes())


def test_the_terminal_is_gone_and_the_service_is_listed(cluster: Cluster):
    assert cluster.url == f"http://{cluster.head.address}:8000"
    assert "ready" in cluster.on_head("ridgeline status")
    assert "runs on this machine already" in refused(cluster)


def refused(cluster: Cluster) -> str:
    """What a second `serve` of the same name says there."""
    again = f"cd ~/ridgeline && ! ridgeline serve --address auto -c served/{cluster.served.name} --detach"
    return cluster.on_head(again)


@on_the_sessions_loop
async def test_12_streams_over_two_hosts_are_those_of_one_engine_bit_for_bit(
    engines: Engines, text: list[int], figure: Figure
):
    before = await engines.metrics()
    prompts = [text[start : start + 20 + start % 60] for start in range(0, NUM_REQUESTS * 100, 100)]
    different, began_s = [], time.monotonic()
    for prompt in prompts:
        reference = (await engines.reference(prompt, NUM_OUTPUT_TOKENS)).token_ids
        await engines.cold()
        if await streamed(engines, prompt, NUM_OUTPUT_TOKENS, []) != reference:
            different.append(len(prompt))
        await engines.cold()
    counted = Increase(before, await engines.metrics())
    figure(f"{NUM_REQUESTS - len(different)} of {NUM_REQUESTS} equal, in {time.monotonic() - began_s:.0f} s")
    assert different == []
    assert counted.sum("ridgeline_requests_total", path="disaggregated", outcome="finished") == NUM_REQUESTS
    assert counted.sum("ridgeline_fetches_total", pool="decode", result="ok") == NUM_REQUESTS
    assert counted.sum("ridgeline_recompute_total") == 0
    assert (await engines.metrics()).by_label("ridgeline_kv_pair", "transport") == {"grpc": 1.0}


@on_the_sessions_loop
async def test_a_decode_host_that_is_cut_off_for_10_s_costs_a_pause_and_comes_back(
    cluster: Cluster, engines: Engines, text: list[int], figure: Figure
):
    prompt = text[10_000:10_060]

    async def cut() -> None:
        cluster.decode.cut_off()
        await asyncio.sleep(CUT_S)
        cluster.decode.join_again()

    token_ids, longest_gap_s, most_s = await with_fault(engines, prompt, cut)
    figure(f"longest gap {longest_gap_s:.1f} s for a host cut off for {CUT_S:.0f} s")
    assert len(token_ids) == LONG_OUTPUT_TOKENS
    await eventually(lambda: engines.decode.connected)  # this process's own connection was cut too
    assert await wrong_tokens_nat(engines, prompt, token_ids) == []
    assert longest_gap_s < most_s
    before, split = await engines.metrics(), {"path": "disaggregated", "outcome": "finished"}
    until_s = time.monotonic() + GONE_WITHIN_S
    while Increase(before, await engines.metrics()).sum("ridgeline_requests_total", **split) == 0:
        assert time.monotonic() < until_s, "it serves again"
        assert len(await engines.tokens(text[11_000:11_030], 4)) == 4
    assert "is gone" not in cluster.on_head("ridgeline logs"), "no worker was replaced for a cut of 10 s"


@on_the_sessions_loop
async def test_a_host_that_is_lost_for_good_leaves_its_streams_to_the_other(
    cluster: Cluster, judged_by_prefill: Engines, text: list[int], figure: Figure
):
    engines, prompt = judged_by_prefill, text[12_000:12_060]

    async def lose() -> None:
        await asyncio.to_thread(cluster.decode.kill)

    token_ids, longest_gap_s, most_s = await with_fault(engines, prompt, lose)
    figure(f"longest gap {longest_gap_s:.1f} s for a host that was lost")
    assert len(token_ids) == LONG_OUTPUT_TOKENS
    assert await wrong_tokens_nat(engines, prompt, token_ids) == []
    assert longest_gap_s < most_s
    assert len(await engines.tokens(text[13_000:13_030], 4)) == 4, "the other host serves alone"


def test_stop_and_ray_down_leave_nothing_on_the_hosts_that_are_left(cluster: Cluster, figure: Figure):
    cluster.took_s.clear()
    cluster.documented("ray exec deploy/cluster-onprem.yaml 'ridgeline stop'")
    assert "no deployment runs" in cluster.on_head("ridgeline status")
    cluster.documented("ray down")
    cluster.prefill.ssh("ridgeline/.venv/bin/ray stop")  # as the file says: `ray down` ends Ray on the head alone
    for host in (cluster.head, cluster.prefill):
        wait_until(lambda host=host: not host.processes(), GONE_WITHIN_S, f"{host.name} is idle: {host.processes()}")
    figure(", ".join(f"{command}: {seconds:.0f} s" for command, seconds in cluster.took_s.items()))
