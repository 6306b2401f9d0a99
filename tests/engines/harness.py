"""A running deployment as the tests see it: its HTTP port, and its two workers without the router in between.

The decode worker, asked for a whole answer without a hand-off, is the single engine everything is compared with.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from vllm.sampling_params import SamplingParams

from ridgeline.contracts.handoff import KvHandoff
from ridgeline.contracts.rpc.tls import TlsFiles
from ridgeline.contracts.tasks import GenerateTask, PositionLogprobs
from ridgeline.contracts.workers import WorkerDescription, WorkerStatus
from ridgeline.engine.request import sampling
from ridgeline.router.front.metrics_page import EVERY_S
from ridgeline.router.front.single_flight import BURST
from ridgeline.worker_runtime.client import WorkerClient
from tests.support import ties
from tests.support.patience import PATIENCE_S
from tests.support.task_deltas import task_deltas

Figure = Callable[[str], None]
COLD_WITHIN_S = 20.0
"""Less than a lease, which would end what a fault has left behind."""
IDLE_WITHIN_S = 2.0
LAST_STEP_S = 0.6
MUST_BE_ZERO = ("open_leases", "pinned_blocks", "active_fetches", "watched_handoffs", "waiting_for_kv")


@dataclass
class Answer:
    """What an engine said, straight from its worker."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] = field(default_factory=list)
    finish_reason: str | None = None


class Metrics:
    """One reading of /metrics."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def sum(self, name: str, **labels: str) -> float:
        """All samples of that name with these labels, added up; none is 0."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and all(sample.labels.get(key) == value for key, value in labels.items())
        )

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The samples of that name, added up by one label."""
        values = {sample.labels[label] for sample in self._samples if sample.name == name}
        return {value: self.sum(name, **{label: value}) for value in sorted(values)}


class Pages:
    """How many pages of /metrics the server will surely render anew, for a reader that asks it alone.

    A server that is asked more often gives its last page again, on which what has just happened is missing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = 0.0
        self._counted_s = clock()

    @property
    def due_s(self) -> float:
        """Seconds until the next page is certainly a new one."""
        return max(0.0, (1.0 - self._now()) * EVERY_S)

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Count a page that is asked for here. Time in which the server may have answered is not counted on."""
        self._left, self._counted_s = max(0.0, self._now() - 1.0), self._clock()
        try:
            yield
        finally:
            self._counted_s = self._clock()

    def _now(self) -> float:
        return min(float(BURST), self._left + (self._clock() - self._counted_s) / EVERY_S)


class Increase:
    """What was counted between two readings."""

    def __init__(self, before: Metrics, after: Metrics) -> None:
        self._before, self._after = before, after

    def sum(self, name: str, **labels: str) -> float:
        return self._after.sum(name, **labels) - self._before.sum(name, **labels)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        before = self._before.by_label(name, label)
        after = self._after.by_label(name, label)
        return {value: after[value] - before.get(value, 0.0) for value in after if after[value] != before.get(value)}


class Engines:
    """One disaggregated deployment: one prefill worker, one decode worker."""

    def __init__(
        self,
        url: str,
        model: str,
        dtype: str,
        model_path: str,
        tokenizer: Any,
        http: httpx.AsyncClient,
        clients: Sequence[WorkerClient],
    ) -> None:
        self.url = url
        self.model = model
        self.dtype = dtype
        self.model_path = model_path
        self.tokenizer = tokenizer
        self.http = http
        self.prefill, self.decode = clients
        self._ids = count()
        self._pages = Pages()

    async def cold(self) -> None:
        """Forget every cached prefix on both workers; waits for blocks still in use."""
        for worker in (self.prefill, self.decode):
            async with asyncio.timeout(COLD_WITHIN_S):
                while not await worker.reset_prefix_cache():  # noqa: ASYNC110 - the engine has no event for it
                    await asyncio.sleep(0.01)

    async def use_transport(self, name: str) -> None:
        """What carries KV from now on, whatever was picked at start; "auto" picks again."""
        prefill, _ = await self.describe()
        wanted = name if name != "auto" else "shm"
        answer = await self.decode.pair(prefill.transfer_addresses, wanted)
        assert not answer.refused, answer.refused
        assert {transport for transport, _ in answer.paired.values()} == {wanted}

    # --- through the front door

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON reply of a request that must succeed."""
        response = await self.http.post(path, json={"model": self.model, **body})
        assert response.status_code == 200, response.text
        reply: dict[str, Any] = response.json()
        return reply

    async def complete(self, prompt: Sequence[int], num_tokens: int, **fields: Any) -> dict[str, Any]:
        """The one choice of a completion of exactly `num_tokens` tokens, greedy unless the fields say otherwise."""
        body = {"prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        reply = await self.post("/v1/completions", {**body, "return_token_ids": True, **fields})
        choice: dict[str, Any] = reply["choices"][0]
        assert len(choice["token_ids"]) == num_tokens
        return choice

    async def tokens(self, prompt: Sequence[int], num_tokens: int, **fields: Any) -> list[int]:
        """Only its token ids."""
        token_ids: list[int] = (await self.complete(prompt, num_tokens, **fields))["token_ids"]
        return token_ids

    async def stream(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[tuple[float, dict[str, Any]]]:
        """(seconds since sending, event) of each server-sent event; leaving the loop closes the connection."""
        began_s = time.monotonic()
        request = {"model": self.model, "stream": True, **body}
        async with self.http.stream("POST", path, json=request, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield time.monotonic() - began_s, json.loads(line.removeprefix("data: "))

    async def metrics(self) -> Metrics:
        """What /metrics says now; waits until it is rendered anew."""
        while (due_s := self._pages.due_s) > 0:  # noqa: ASYNC110 - others may ask meanwhile
            await asyncio.sleep(due_s)
        return await self.latest_metrics()

    async def latest_metrics(self) -> Metrics:
        """What /metrics says at once, which may be half a second old if it is asked often."""
        with self._pages.asked():
            return Metrics((await self.http.get("/metrics")).text)

    # --- past the router

    async def run(self, worker: WorkerClient, **task: Any) -> tuple[Answer, KvHandoff | None]:
        """One leg on one worker."""
        answer, handoff = Answer(), None
        async for delta in task_deltas(worker, GenerateTask(request_id=f"test-{next(self._ids)}", **task)):
            answer.token_ids += delta.token_ids
            answer.logprobs += delta.logprobs or []
            answer.prompt_logprobs = delta.prompt_logprobs or answer.prompt_logprobs
            answer.finish_reason = delta.finish_reason
            handoff = delta.handoff or handoff
        return answer, handoff

    async def reference(self, prompt: Sequence[int], num_tokens: int, **params: Any) -> Answer:
        """The single engine's answer to the same request."""
        wish = {"temperature": 0.0, "ignore_eos": True, "max_tokens": num_tokens, **params}
        leg = {"leg": "decode", "prompt_token_ids": list(prompt), "sampling": sampling.encode(SamplingParams(**wish))}
        return (await self.run(self.decode, **leg))[0]

    def is_tie(self, behind_nat: float) -> bool:
        """Whether a token this far behind the best one may be chosen for it in this deployment's number format."""
        return ties.is_tie(behind_nat, self.dtype)

    async def behind_best_nat(self, prompt: Sequence[int], common: Sequence[int], token: int) -> float:
        """How far the single engine ranks `token` below its best one after prompt + common tokens."""
        answer = await self.reference([*prompt, *common], 1, logprobs=20)
        return ties.behind_best_nat(answer.logprobs[0], token)

    async def behind_best_nats(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """How far the single engine, given the prompt and the answer so far, ranks each token below its best one.

        One prefill of both together, so it costs less than the answer did. Raises AssertionError if it scored others.
        """
        wish = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        task = {"prompt_token_ids": [*prompt, *answer], "sampling": sampling.encode(wish)}
        scored, _ = await self.run(self.decode, leg="decode", **task)
        positions = [position for position in scored.prompt_logprobs[-len(answer) :] if position is not None]
        assert [position.token_ids[0] for position in positions] == list(answer)
        return [max(position.logprobs) - position.logprobs[0] for position in positions]

    async def describe(self) -> tuple[WorkerDescription, WorkerDescription]:
        """Prefill, decode."""
        return await self.prefill.describe(), await self.decode.describe()

    async def leftovers(self) -> dict[str, float]:
        """Everything still held on either worker; empty when all is clean."""
        statuses = [await worker.status() for worker in (self.prefill, self.decode)]
        return {name: value for status in statuses for name, value in held(status).items() if value}

    async def stale_handoffs(self, for_s: float = 0.0) -> list[str]:
        """The lives of hand-offs that nobody has released, as soon as a worker tells of one, at most after so long."""
        deadline_s = time.monotonic() + for_s
        while True:
            lives = [life for worker in (self.prefill, self.decode) for life in (await worker.status()).stale_handoffs]
            if lives or time.monotonic() >= deadline_s:
                return lives
            await asyncio.sleep(0.1)

    async def becomes_idle(self, within_s: float = IDLE_WITHIN_S) -> dict[str, float]:
        """What is still held on a worker or in the router after at most `within_s`; nothing also has to stay nothing.

        A worker tells what it held at the end of its last step, and one step may still be under way. The router tells
        on /metrics, which it seldom renders, so it is asked last.
        """
        deadline_s = time.monotonic() + within_s
        while (left := await self.leftovers()) and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await asyncio.sleep(LAST_STEP_S)
        left = left or await self.leftovers()
        while not left and (in_flight := (await self.latest_metrics()).sum("ridgeline_requests_in_flight")):
            if time.monotonic() > deadline_s:
                left = {"in_flight": in_flight}
            await asyncio.sleep(0.1)
        if left:  # shown by pytest where this fails a test
            print(f"still held: {left}", *await self.stale_handoffs(IDLE_WITHIN_S), sep="\n")  # noqa: T201
        return left


@asynccontextmanager
async def connected(addresses: Sequence[str], tls: TlsFiles | None = None) -> AsyncIterator[list[WorkerClient]]:
    """Clients of these workers beside the router's own, with their streams up."""
    clients = [WorkerClient(address, f"test-{secrets.token_hex(4)}", tls=tls) for address in addresses]
    running = [asyncio.create_task(client.run()) for client in clients]
    try:
        for client in clients:
            await client.wait_connected(PATIENCE_S)
        yield clients
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for client in clients:
            await client.close()


def held(status: WorkerStatus) -> dict[str, float]:
    """What this worker holds, by its name and what it is; zeros included."""
    values = {"running": status.running, "waiting": status.waiting, "tasks": status.tasks}
    values["kv_blocks"] = status.kv_blocks_total - status.kv_blocks_free
    values |= {name: status.counters.get(name, 0.0) for name in MUST_BE_ZERO}
    return {f"{status.worker_id}.{name}": value for name, value in values.items()}


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first position at which two answers of the same length differ."""
    pairs = zip(ours, theirs, strict=True)
    return next((position for position, (one, other) in enumerate(pairs) if one != other), None)
