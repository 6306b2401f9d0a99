"""The commands of docs/how-to/deploy.md on an EC2 that is emulated, then what a cluster meets until it is taken down.

The tests stand in the order in which they run, since one cluster meets all of it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
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
from tests.hosts.conftest import REASON_WITHIN_S, Cluster, wait_until
from tests.hosts.ec2 import OPERATORS_KEY, ROLES_KEY, tags_of
from tests.hosts.image import APT_LOG, FAILS
from tests.hosts.operators_shell import Running, documented
from tests.support.patience import eventually

pytestmark = [pytest.mark.engines, pytest.mark.hosts]
on_the_sessions_loop = pytest.mark.asyncio(loop_scope="session")

NUM_REQUESTS, NUM_OUTPUT_TOKENS = 50, 4
LONG_OUTPUT_TOKENS = 150
TOKENS_BEFORE_FAULT = 10
CUT_S = 10.0
PAUSE_S = 15.0
"""A stream's longest gap if its decode host vanishes: 5 s until its silence is noticed, then the prompt once more."""
NOTICED_S, PROMPT_STEPS = 5.0, 40
"""On a slow machine that prompt, of 200 tokens, takes as long as so many of the stream's own steps."""
GONE_WITHIN_S = 30.0
NODE_WITHIN_S = 120.0
"""From a demand to a node that Ray has set up and joined."""
WORKER_WITHIN_S = 240.0
IDLE_MINUTES = 0.1


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


async def with_fault(
    engines: Engines, prompts: list[list[int]], fault: Callable[[], Awaitable[None]]
) -> tuple[list[list[int]], float, float]:
    """Tokens of long streams in whose middle `fault` is awaited, their longest gap and how long that may be, in s."""
    came_s: list[list[float]] = [[] for _ in prompts]
    streams = [
        asyncio.create_task(streamed(engines, prompt, LONG_OUTPUT_TOKENS, each))
        for prompt, each in zip(prompts, came_s, strict=True)
    ]
    while min(map(len, came_s)) < TOKENS_BEFORE_FAULT and not any(stream.done() for stream in streams):  # noqa: ASYNC110
        await asyncio.sleep(0.02)  # a list has no event
    assert not any(stream.done() for stream in streams), "an answer was over before the fault"
    await fault()
    token_ids = await asyncio.gather(*streams)
    gaps_s = [later - earlier for each in came_s for earlier, later in pairwise(each)]
    return token_ids, max(gaps_s), max(PAUSE_S, NOTICED_S + PROMPT_STEPS * median(gaps_s))


def test_while_nodes_are_refused_serve_says_why_in_the_words_of_aws(
    launching: tuple[Cluster, Running], cluster: Cluster
):
    _, serve = launching
    waits = " ".join(serve.text.split()).split("waiting for Ray to place")[1:]
    for code in ("UnauthorizedOperation", "InsufficientInstanceCapacity"):
        for node_type in ("prefill", "decode"):
            said = f"nodes of type {node_type}: Node Launch Exception ({code})"
            assert any(said in line for line in waits), waits


def test_ec2_was_asked_for_a_head_and_one_node_of_each_pool_and_for_nothing_else(cluster: Cluster, figure: Figure):
    asked = Counter(
        (call.by, call.parameters["InstanceType"], tag_of(call.parameters, "ray-user-node-type"))
        for call in cluster.ec2.called("RunInstances")
        for _ in range(int(call.parameters["MaxCount"]))
    )
    figure(", ".join(f"{node_type} {kind} x{number} by {by}" for (by, kind, node_type), number in asked.items()))
    pools = {(ROLES_KEY, "p5.48xlarge", pool) for pool in ("prefill", "decode")}
    assert asked.keys() == {(OPERATORS_KEY, "m7i.4xlarge", "head"), *pools}
    assert asked[OPERATORS_KEY, "m7i.4xlarge", "head"] == 1
    # Once in some twenty runs Ray asked for up to two where one was enough (MaxCount), on a machine that was slow.
    assert all(asked[pool] <= 2 for pool in pools)
    running = cluster.ec2.instances()
    assert {tags_of(one)["ray-cluster-name"] for one in running} == {"ridgeline"}
    assert {one["Placement"]["AvailabilityZone"] for one in running} == {"us-west-2a"}
    assert [tags_of(one)["ray-node-type"] for one in running if "IamInstanceProfile" in one] == ["head"]
    counted = Counter(f"{call.action} {call.refused}".strip() for call in cluster.ec2.calls)
    figure(", ".join(f"{action}: {number}" for action, number in sorted(counted.items())))


def tag_of(parameters: dict[str, str], key: str) -> str:
    """The value of a tag with which an instance is asked for."""
    (name,) = (name for name, value in parameters.items() if name.startswith("TagSpec") and value == key)
    return parameters[name.removesuffix("Key") + "Value"]


def test_every_host_is_set_up_and_joins_with_the_resources_of_its_type(cluster: Cluster):
    for host in (*cluster.ec2.hosts_of("prefill"), *cluster.ec2.hosts_of("decode")):
        assert "install -qy make" in host.ssh(f"cat {APT_LOG}").stdout
    status = cluster.on_head("ray status")
    assert "/16.0 GPU" in status, "that the types say, though no machine here has any"
    for name in ("decode", "prefill"):
        assert f"1 {name}" in status
        assert f"8.0/8.0 ridgeline_{name}" in status


def test_the_service_spans_two_hosts(cluster: Cluster, figure: Figure):
    figure(", ".join(f"{command}: {seconds:.0f} s" for command, seconds in cluster.shell.took_s.items()))
    prefill, decode = cluster.ec2.hosts_of("prefill")[0], cluster.ec2.hosts_of("decode")[0]
    told = " ".join(cluster.shell.output.split())
    assert f"checking {', '.join(sorted((prefill.address, decode.address)))}" in told
    assert "KV goes by grpc" in told
    assert "not shm: it is on another host" in told
    assert any("EngineCore" in line for line in decode.processes())


def test_the_port_is_forwarded_to_the_operators_machine(cluster: Cluster):
    logs = cluster.shell.begin(documented("AWS", "ray exec deploy/cluster.yaml 'ridgeline logs"))
    logs.wait_for(lambda text: "ready: " in text, 60)
    models = httpx.get("http://127.0.0.1:8000/v1/models", timeout=30).json()
    assert [one["id"] for one in models["data"]] == [DEFAULT_MODEL_NAME]
    assert "<html" in httpx.get("http://127.0.0.1:8000/", timeout=30).text
    logs.end()


def test_the_terminal_is_gone_and_the_service_is_listed(cluster: Cluster):
    assert cluster.url == f"http://{cluster.head.address}:8000"
    assert "ready" in cluster.on_head("ridgeline status")
    again = "cd ~/ridgeline && ridgeline serve --address auto -c deploy/cluster-serve.yaml --detach"
    assert "runs on this machine already" in cluster.on_head(again, fails=True)


@on_the_sessions_loop
async def test_50_streams_over_two_hosts_are_those_of_one_engine_bit_for_bit(
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
    assert (await engines.metrics()).by_label("ridgeline_kv_pair", "transport") == {"grpc": 2.0}


@on_the_sessions_loop
async def test_a_decode_host_that_is_cut_off_for_10_s_costs_a_pause_and_comes_back(
    cluster: Cluster, engines: Engines, text: list[int], figure: Figure
):
    prompt, (decode,) = text[10_000:10_060], cluster.ec2.hosts_of("decode")

    async def cut() -> None:
        decode.cut_off()
        await asyncio.sleep(CUT_S)
        decode.join_again()

    (token_ids,), longest_gap_s, most_s = await with_fault(engines, [prompt], cut)
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


def test_scaling_up_launches_a_node_whose_failing_set_up_is_told_and_tried_again(cluster: Cluster, figure: Figure):
    began_s, (first,) = time.monotonic(), cluster.ec2.running("decode")
    cluster.ec2.broken.add("decode")
    scale = cluster.shell.begin("ray exec deploy/cluster.yaml 'ridgeline scale decode=2'")
    wait_until(lambda: set(cluster.ec2.running("decode")) - {first}, NODE_WITHIN_S, "a second decode node")
    (failing,) = set(cluster.ec2.running("decode")) - {first}
    told = f"Ray installation failed on instance {failing}"
    scale.wait_for(lambda text: told in " ".join(text.split()), REASON_WITHIN_S)
    cluster.ec2.broken.clear()
    cluster.ec2.hosts[failing].ssh(f"rm {FAILS}")
    scale.wait(WORKER_WITHIN_S)
    assert "decode has 2 workers" in scale.text
    figure(f"a decode node more, whose set-up failed at first: {time.monotonic() - began_s:.0f} s")
    assert len(cluster.ec2.running("decode")) == 2


@on_the_sessions_loop
async def test_a_node_that_ec2_takes_back_under_load_leaves_its_streams_to_the_others(
    cluster: Cluster, judged_by_prefill: Engines, text: list[int], figure: Figure
):
    engines, prompts = judged_by_prefill, [text[start : start + 60] for start in (12_000, 13_000)]
    first = cluster.ec2.running("decode")[0]

    async def take_back() -> None:
        await asyncio.to_thread(cluster.ec2.client("ec2").terminate_instances, InstanceIds=[first])

    streams, longest_gap_s, most_s = await with_fault(engines, prompts, take_back)
    figure(f"longest gap {longest_gap_s:.1f} s for a node that was taken back")
    assert [len(token_ids) for token_ids in streams] == [LONG_OUTPUT_TOKENS] * 2
    for prompt, token_ids in zip(prompts, streams, strict=True):
        assert await wrong_tokens_nat(engines, prompt, token_ids) == []
    assert longest_gap_s < most_s
    assert len(await engines.tokens(text[14_000:14_030], 4)) == 4, "the others serve"
    await asyncio.to_thread(wait_until, lambda: len(cluster.ec2.running("decode")) == 2, NODE_WITHIN_S, "another node")


def test_after_scaling_down_an_idle_node_ends(cluster: Cluster, figure: Figure):
    # The file's quarter of an hour is the only thing that is shortened.
    shorter = f's/(idle_timeout_minutes"?: )15/\\1{IDLE_MINUTES}/'
    cluster.on_head(
        f"sed -E -i '{shorter}' ~/ray_bootstrap_config.yaml && grep -c {IDLE_MINUTES} ~/ray_bootstrap_config.yaml"
    )
    assert "decode has 1 worker" in cluster.on_head("ridgeline scale decode=1")
    began_s = time.monotonic()
    wait_until(lambda: len(cluster.ec2.running("decode")) == 1, NODE_WITHIN_S, "the idle node ends")
    figure(f"an idle node ended {time.monotonic() - began_s:.0f} s after scaling down")
    (ended,) = cluster.ec2.called("TerminateInstances")
    assert ended.by == ROLES_KEY, "Ray's autoscaler ended it, and nobody else has ended anything so far"
    assert len(cluster.ec2.running("prefill")) == 1
    assert "ready" in cluster.on_head("ridgeline status")


def test_stop_and_ray_down_leave_nothing_on_ec2(cluster: Cluster, figure: Figure):
    cluster.shell.took_s.clear()
    cluster.documented("ray exec deploy/cluster.yaml 'ridgeline stop")
    assert "no deployment runs" in cluster.on_head("ridgeline status")
    cluster.documented("ray down")
    wait_until(lambda: not cluster.ec2.instances(), GONE_WITHIN_S, "nothing runs")
    figure(", ".join(f"{command}: {seconds:.0f} s" for command, seconds in cluster.shell.took_s.items()))
