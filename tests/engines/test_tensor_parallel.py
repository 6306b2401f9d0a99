"""Engines split over ranks hand KV to engines split otherwise, and the answer is that of one whole engine.

Four engines on real Ray: prefill and decode, each whole and split in two. They share this machine's cores, which only
costs time; what is shown is that the right heads arrive, not how fast.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from prometheus_client import CollectorRegistry
from vllm.sampling_params import SamplingParams

from ridgeline.cluster.config.loader import load_config
from ridgeline.cluster.doctor.checks import resolve_dtype
from ridgeline.cluster.model_store import prepare_model
from ridgeline.cluster.runtime.handles.worker import worker_actor
from ridgeline.cluster.runtime.plan import make_plan
from ridgeline.cluster.runtime.ray_start import ray_runtime
from ridgeline.cluster.runtime.services import WorkerReady
from ridgeline.contracts.handoff import KvHandoff
from ridgeline.contracts.tasks import TokenDelta
from ridgeline.contracts.workers import WorkerDescription
from ridgeline.engine.request import sampling
from ridgeline.kv_transfer.memory.host import HostMemory
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.kv_transfer.transports import make_transport
from ridgeline.prefill_worker.kv_source.block_server import RankCache
from ridgeline.prefill_worker.kv_source.lease import LeaseTable
from ridgeline.router.dispatch.orchestrator import HandoffReleaser, Orchestrator
from ridgeline.router.dispatch.request import SequenceRequest
from ridgeline.router.fleet.fleet import Fleet
from ridgeline.router.front.sampling import sampling_of
from ridgeline.router.observe.metrics import RequestMetrics
from ridgeline.router.placement.cluster_state import ClusterState
from ridgeline.router.placement.places import own_placement
from ridgeline.worker_runtime.client import WorkerClient
from tests.engines.conftest import CONFIG, TEXT
from tests.engines.harness import COLD_WITHIN_S, Engines, Figure, held
from tests.engines.serve_process import still_there
from tests.engines.tiny_model import NUM_KV_HEADS, NUM_LAYERS, make_tiny_model
from tests.support.patience import PATIENCE_S
from tests.support.samples import router_settings
from tests.support.ties import tie_nat

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

PAIRS = [(2, 1), (1, 2), (2, 2)]
"""Ranks of the prefill engine, ranks of the decode engine."""
MAX_MODEL_LEN_TOKENS = 1024
CHUNK_TOKENS = 128
NUM_OUTPUT_TOKENS = 8
PROMPT_LENGTHS = [5, 32, 64, 100, 300]
"""Less than a block, a block, two blocks, part of a chunk, and three chunks, so that decode follows the prefill."""
LARGEST_KV_DIFFERENCE = {"float32": 1e-4, "bfloat16": 6e-2}
"""Of the largest value: ranks add up in another order. Two heads differ by about the largest value itself."""
GONE_WITHIN_S = 60.0
"""An engine looks for its ranks every few seconds, and took 13 s on a busy machine."""


@dataclass
class Engine:
    """One worker actor and the way to its engine."""

    actor: Any
    ready: WorkerReady
    client: WorkerClient
    description: WorkerDescription


class Split:
    """The engines by pool and ranks, and the whole one of each pool as the reference."""

    def __init__(self, engines: dict[tuple[str, int], Engine], dtype: str, model_path: str, text: list[int]) -> None:
        self.engines = engines
        self.dtype = dtype
        self.text = text
        clients = [engines["prefill", 1].client, engines["decode", 1].client]
        self.whole = Engines("", "", dtype, model_path, None, None, clients)  # type: ignore[arg-type]
        self.settings = router_settings(
            model_path=model_path,
            served_names=("tiny",),
            dtype=dtype,
            max_model_len=MAX_MODEL_LEN_TOKENS,
            request_timeout_s=60.0,
            max_concurrent_requests=16,
            recovery_timeout_s=60.0,
            ready_deadline_s=10.0,
        )

    async def prefill(self, ranks: int, prompt: list[int]) -> KvHandoff:
        """The hand-off of a prompt that nobody decodes yet."""
        wish = sampling.encode(SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_OUTPUT_TOKENS))
        client = self.engines["prefill", ranks].client
        _, handoff = await self.whole.run(client, leg="prefill", prompt_token_ids=prompt, sampling=wish)
        assert handoff is not None
        assert handoff.complete
        return handoff

    async def decode_counters(self, ranks: int) -> dict[str, float]:
        """Counters up to now: an engine tells them with its steps, so it is given one."""
        client = self.engines["decode", ranks].client
        wish = sampling.encode(SamplingParams(max_tokens=1))
        await self.whole.run(client, leg="decode", prompt_token_ids=self.text[:3], sampling=wish)
        return (await client.status()).counters

    async def leftovers(self) -> dict[str, float]:
        """What any engine still holds, a second after the last step that could tell."""
        for _ in range(20):
            statuses = [await engine.client.status() for engine in self.engines.values()]
            left = {name: value for status in statuses for name, value in held(status).items() if value}
            if not left:
                break
            await asyncio.sleep(0.2)
        return left


class Background:
    """Tasks that run until the block ends."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def create_task(self, coroutine: Coroutine[Any, Any, None], name: str | None = None) -> None:
        self._tasks.append(asyncio.create_task(coroutine, name=name))

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, made once."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepare_model("smollm2-135m"))
    dtype = resolve_dtype(load_config(CONFIG).config)
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"), tokenizer, dtype, MAX_MODEL_LEN_TOKENS)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def split(model: Path) -> AsyncIterator[Split]:
    """Four engines, started together."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    dtype = resolve_dtype(load_config(CONFIG).config)
    text = tokenizer(TEXT.read_text()[:20_000], add_special_tokens=False, verbose=False)["input_ids"]
    background = Background()
    async with AsyncExitStack() as stack:
        configs = {ranks: settings(str(model), ranks) for ranks in (1, 2)}
        await stack.enter_async_context(ray_runtime(configs[2]))
        actors: dict[tuple[str, int], Any] = {}
        starts = []
        for ranks, config in configs.items():
            plan = await asyncio.to_thread(make_plan, config)
            for worker in plan.workers:
                actor = actors[worker.pool, ranks] = worker_actor(worker, config)
                engine = replace(plan.engine_config(worker, "127.0.0.1"), worker_id=f"{worker.pool}-of-{ranks}")
                starts.append(started(actor, engine, shared_cores(ranks)))
        ready = dict(zip(actors, await asyncio.gather(*starts), strict=True))
        engines = {}
        for name, actor in actors.items():
            client = WorkerClient(ready[name].address, f"test-{name[0]}-{name[1]}")
            background.create_task(client.run())
            await client.wait_connected(PATIENCE_S)
            engines[name] = Engine(actor, ready[name], client, await client.describe())
        try:
            yield Split(engines, dtype, str(model), text)
        finally:
            await background.end()
            for engine in engines.values():
                await engine.client.close()
            stopping = (asyncio.wait_for(actor.call.remote("stop"), 30) for actor in actors.values())
            await asyncio.gather(*stopping, return_exceptions=True)  # a test may have ended it already


async def started(actor: Any, *args: Any) -> Any:
    await actor.begin.remote()
    return await actor.call.remote("start", *args, False)  # four engines share these cores


def settings(model: str, ranks: int) -> Any:
    flags = {"model.path": model, "model.max_model_len": str(MAX_MODEL_LEN_TOKENS)}
    for pool in ("prefill", "decode"):
        flags |= {
            f"pools.{pool}.tensor_parallel_size": str(ranks),
            f"pools.{pool}.cores_per_worker": str(ranks),
            f"pools.{pool}.max_num_batched_tokens": str(CHUNK_TOKENS),
            f"pools.{pool}.kv_cache_memory_bytes": "64 MiB",
        }
    return load_config(CONFIG, flags | {"pools.colocated.workers": "4"}).config


def shared_cores(ranks: int) -> tuple[int, ...]:
    """A core for each rank, the same ones for every engine: four engines have six ranks."""
    mine = sorted(os.sched_getaffinity(0))
    return tuple(mine[rank % len(mine)] for rank in range(ranks))


# --- the KV itself


async def fetched(handoff: KvHandoff, description: WorkerDescription, our_ranks: int) -> torch.Tensor:
    """float32 [layers, blocks, KV heads, values], pulled as a decode engine of `our_ranks` would; then released."""
    source = description.layout
    block_bytes = source.block_bytes * source.tensor_parallel_size // our_ranks
    layout = msgspec.structs.replace(source, tensor_parallel_size=our_ranks, block_bytes=block_bytes)
    parts = []
    for rank in range(our_ranks):
        rows = [np.zeros((handoff.num_blocks, block_bytes), dtype=np.uint8) for _ in range(layout.num_layers)]
        cache = RankCache(HostMemory(rows), LeaseTable(), layout, rank)
        _, fetcher = make_transport(cache, TransferOptions("127.0.0.1", transport="grpc"))
        result = await fetcher.fetch(handoff, {0: range(handoff.num_blocks)}, cache.pool)
        assert result.outcome == "ok", result
        await fetcher.release(handoff)
        await fetcher.close()
        parts.append(np.stack(rows))
    whole = np.ascontiguousarray(np.concatenate(parts, axis=2))
    values = torch.from_numpy(whole).view(getattr(torch, source.kv_dtype)).float()
    return values.reshape(layout.num_layers, handoff.num_blocks, source.num_kv_heads, -1)


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), PAIRS)
async def test_the_kv_that_arrives_is_head_by_head_that_of_one_whole_engine(
    split: Split, prefill_ranks: int, decode_ranks: int, figure: Figure
):
    prompt = split.text[:320]  # whole blocks only: what lies behind a prompt's last token is anybody's
    engine, whole = split.engines["prefill", prefill_ranks], split.engines["prefill", 1]
    assert len(engine.description.transfer_addresses) == prefill_ranks
    ours = await fetched(await split.prefill(prefill_ranks, prompt), engine.description, decode_ranks)
    reference = await fetched(await split.prefill(1, prompt), whole.description, 1)
    assert ours.shape == reference.shape
    assert ours.shape[:3] == (NUM_LAYERS, 10, NUM_KV_HEADS)
    largest = reference.abs().amax()
    worst = (ours - reference).abs().amax(dim=(0, 1, 3)) / largest
    apart = min(
        float((reference[:, :, one] - reference[:, :, other]).abs().amax() / largest)
        for one in range(NUM_KV_HEADS)
        for other in range(one)
    )
    figure(
        f"P/D {prefill_ranks}/{decode_ranks}, {split.dtype}: largest difference of each head, relative to the largest "
        f"value, {', '.join(f'{float(value):.1e}' for value in worst)}; between two heads at least {apart:.2f}"
    )
    assert worst.max() <= LARGEST_KV_DIFFERENCE[split.dtype]
    assert apart > 0.3, "the heads are too much alike: this test shows nothing"
    assert await split.leftovers() == {}, "released by every reader, and still held"


# --- the tokens


@asynccontextmanager
async def routed(split: Split, prefill_ranks: int, decode_ranks: int) -> AsyncIterator[tuple[Orchestrator, Any, Fleet]]:
    """The router's own way through one prefill and one decode engine; (orchestrator, its metrics, fleet)."""
    background, releaser = Background(), HandoffReleaser()
    fleet = Fleet(f"test-{prefill_ranks}-{decode_ranks}")
    metrics = RequestMetrics(CollectorRegistry())
    addresses = [
        split.engines["prefill", prefill_ranks].ready.address,
        split.engines["decode", decode_ranks].ready.address,
    ]
    try:
        background.create_task(releaser.run())
        await fleet.connect(addresses, background)  # type: ignore[arg-type]
        placement = own_placement(ClusterState(fleet, split.settings), fleet, split.settings)
        yield Orchestrator(placement, split.settings, metrics, releaser.release), metrics, fleet
    finally:
        await background.end()
        for worker in fleet.workers:
            await worker.client.close()


async def answer(orchestrator: Orchestrator, prompt: list[int]) -> list[int]:
    """All tokens of one greedy request."""
    token_ids: list[int] = []

    def emit(delta: TokenDelta) -> bool:
        token_ids.extend(delta.token_ids)
        return False

    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_OUTPUT_TOKENS)
    await orchestrator.run(SequenceRequest(f"greedy-{len(prompt)}", prompt, sampling_of(params)), emit)
    return token_ids


async def behind_best_nat(split: Split, prompt: list[int], token_ids: list[int]) -> float:
    """How far the whole engine ranks the worst of these tokens below its own best one."""
    gaps = [
        await split.whole.behind_best_nat(prompt, token_ids[:position], token)
        for position, token in enumerate(token_ids)
    ]
    return max(gaps)


async def cold(split: Split) -> None:
    for engine in split.engines.values():
        async with asyncio.timeout(COLD_WITHIN_S):
            while not await engine.client.reset_prefix_cache():  # noqa: ASYNC110 - the engine has no event for it
                await asyncio.sleep(0.05)


@pytest.mark.proves(("tensor parallel, equal ranks", "tensor parallel, unequal ranks"), "disaggregated")
@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), PAIRS)
async def test_every_greedy_token_is_one_that_a_whole_engine_could_have_chosen(
    split: Split, prefill_ranks: int, decode_ranks: int, figure: Figure
):
    before = await split.decode_counters(decode_ranks)
    worst, start = {}, 1000
    async with routed(split, prefill_ranks, decode_ranks) as (orchestrator, metrics, fleet):
        for length in PROMPT_LENGTHS:
            prompt = split.text[start : start + length]
            start += length
            await cold(split)
            token_ids = await answer(orchestrator, prompt)
            assert len(token_ids) == NUM_OUTPUT_TOKENS
            worst[length] = await behind_best_nat(split, prompt, token_ids)
        followed = metrics.overlapped.labels("ok")._value.get()
        after = await split.decode_counters(decode_ranks)
        pairs = [(pair.transport, pair.why) for pair in fleet.kv_pairs]
    told = ", ".join(f"{length} tokens {gap:.4f}" for length, gap in worst.items())
    figure(f"P/D {prefill_ranks}/{decode_ranks} over {pairs}: nat behind the best, by prompt: {told}")
    assert [length for length, gap in worst.items() if not split.whole.is_tie(gap)] == []
    assert [transport for transport, _ in pairs] == ["shm"]
    assert followed == len(PROMPT_LENGTHS), "every prompt is followed, those of one step too"
    # One fetch a prompt however many ranks made it, and nothing computed twice.
    assert after["fetches_total.ok"] - before.get("fetches_total.ok", 0) == len(PROMPT_LENGTHS)
    assert [name for name in after if name.startswith(("recompute_total.", "fetches_total."))] == ["fetches_total.ok"]
    assert await split.leftovers() == {}


@pytest.mark.parametrize("decode_ranks", [1, 2])
async def test_the_kv_of_another_prompt_would_be_noticed(split: Split, decode_ranks: int, figure: Figure):
    """Else the test above would show nothing: in a random model the last token alone might decide."""
    prompt, other = split.text[3000:3100], [*split.text[4000:4099], split.text[3099]]
    await cold(split)
    handoff = await split.prefill(2, other)
    first = (await split.whole.reference(prompt, 1)).token_ids
    wish = sampling.encode(SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_OUTPUT_TOKENS))
    leg = {"leg": "decode", "prompt_token_ids": prompt, "emitted_token_ids": first, "sampling": wish}
    wrong, _ = await split.whole.run(split.engines["decode", decode_ranks].client, handoff=handoff, **leg)
    behind_nat = await behind_best_nat(split, prompt, first + wrong.token_ids)
    figure(f"the worst token from another prompt's KV is {behind_nat:.2f} nat behind (inf: not among the 20 best)")
    assert behind_nat > 5 * tie_nat(split.dtype)
    assert await split.leftovers() == {}


# --- what the ranks have and leave


@pytest.mark.parametrize("pool", ["prefill", "decode"])
async def test_each_rank_computes_on_its_own_share_of_the_workers_cores(split: Split, pool: str):
    engine = split.engines[pool, 2]
    _, ranks = processes_of(engine)
    assert sorted(rank.cpu_affinity() for rank in ranks) == sorted([core] for core in engine.ready.cores)


def mapped_queues(pid: int) -> list[str]:
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/psm_" in line]


async def test_the_queues_between_ranks_have_no_name_that_could_stay_behind(split: Split):
    pids = [pid for engine in split.engines.values() for pid in engine.ready.engine_pids]
    mapped = [line for pid in pids for line in mapped_queues(pid)]
    assert mapped, "vLLM's queues are called otherwise now: this test shows nothing"
    assert [line for line in mapped if not line.endswith(" (deleted)")] == []


# --- processes; these end engines, so they come last


def processes_of(engine: Engine) -> tuple[psutil.Process, list[psutil.Process]]:
    """The engine process and its ranks."""
    (core,) = [child for child in map(psutil.Process, engine.ready.engine_pids) if child.ppid() == engine.ready.pid]
    return core, [process for process in map(psutil.Process, engine.ready.engine_pids) if process.pid != core.pid]


async def test_an_engine_that_loses_a_rank_ends_with_all_of_them(split: Split, figure: Figure):
    engine = split.engines["prefill", 2]
    core, ranks = processes_of(engine)
    assert len(ranks) == 2
    killed_s = time.monotonic()
    os.kill(ranks[1].pid, signal.SIGKILL)
    assert await asyncio.to_thread(still_there, [core, *ranks], GONE_WITHIN_S) == []
    figure(f"the engine process and the other rank ended {time.monotonic() - killed_s:.1f} s after a rank was killed")
    async with asyncio.timeout(PATIENCE_S):  # a thread of the worker takes note of it
        while await engine.actor.failure.remote() != "engine_died":  # noqa: ASYNC110 - an actor has no event
            await asyncio.sleep(0.05)


async def test_no_rank_outlives_its_worker(split: Split, figure: Figure):
    engine = split.engines["decode", 2]
    core, ranks = processes_of(engine)
    killed_s = time.monotonic()
    os.kill(engine.ready.pid, signal.SIGKILL)
    assert await asyncio.to_thread(still_there, [core, *ranks], GONE_WITHIN_S) == []
    figure(f"engine process and both ranks ended {time.monotonic() - killed_s:.1f} s after their worker was killed")
