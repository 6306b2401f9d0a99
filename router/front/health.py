"""GET /ready: whether each pool can make a token now, shown by recent tokens, or else by a health probe of two tokens.

The probe is a request like any other, through every worker, queue and hand-off. But it goes ahead of all waiting
requests, skips admission, and is not counted among the requests. Its prompt is random, so that no cache answers.
"""

from __future__ import annotations

import asyncio
import math
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from vllm.sampling_params import SamplingParams

from ridgeline.contracts.errors import EngineError
from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.dispatch.orchestrator import DeadlineExceeded, Orchestrator
from ridgeline.router.dispatch.request import Emit, SequenceRequest
from ridgeline.router.fleet.fleet import Worker
from ridgeline.router.fleet.request_route import NoWorker
from ridgeline.router.front.sampling import sampling_of
from ridgeline.router.front.single_flight import SingleFlight
from ridgeline.router.observe.metrics import RequestMetrics

RECENT_S = 2.0
"""A pool whose last token is younger than this makes progress."""
REUSE_S = 1.0
"""A verdict is reused for this long after its check has begun."""
PROBE_CLIENT = "health-probe"
THE_OTHERS_SERVE = "all of its workers were drained or have left; those of the other pool serve whole requests"


@dataclass(frozen=True)
class PoolVerdict:
    """Whether one pool is ready; `why` is the reason if not, otherwise a note."""

    ready: bool
    last_token_s_ago: float | None
    why: str = ""


Verdict = Mapping[Pool, PoolVerdict]


class Readiness:
    """Checks whether each pool makes progress. Concurrent callers share one check."""

    def __init__(
        self,
        pools: Callable[[], Mapping[Pool, Sequence[Worker]]],
        probe: Callable[[], Awaitable[None]],
        refresh: Callable[[], Awaitable[None]],
        deadline_s: float,
        metrics: RequestMetrics,
        clock: Callable[[], float] = time.monotonic,
        *,
        away: Callable[[], Mapping[str, str]] = dict,
        late: Callable[[], str] = str,
    ) -> None:
        self.away = away
        """Workers that are lost again and again, and how they are tried again."""
        self.late = late
        """Says that the router is the bottleneck, if it is."""
        self.mode: Callable[[], str] = str
        """Returns the mode in which new requests are served."""
        self._pools = pools
        self._probe = probe
        self._refresh = refresh
        self._deadline_s = deadline_s
        self._metrics = metrics
        self._clock = clock
        self.check = SingleFlight(self._look_now, REUSE_S, clock, burst=1)
        """Returns the verdict by pool, shortly after the deadline at the latest."""

    async def _look_now(self) -> Verdict:
        verdict = {pool: self._recent(pool, workers) for pool, workers in self._pools().items()}
        tried = [pool for pool in verdict if self._has_worker(pool) and not self._can_be_spared(pool)]
        if all(verdict[pool].ready for pool in tried):
            return verdict
        began_s, computed = self._clock(), self._computed()
        problem = await self._try_probe()
        await self._refresh()
        before, verdict = verdict, {}
        for pool, workers in self._pools().items():  # other ones if the mode has changed meanwhile
            if not self._has_worker(pool):
                verdict[pool] = self._recent(pool, workers)
            elif pool in before and pool not in tried:
                verdict[pool] = before[pool]
            else:
                progressed = self._computed()[pool] > computed.get(pool, math.inf)
                verdict[pool] = self._judge(workers, problem, began_s, progressed)
        return verdict

    def _recent(self, pool: Pool, workers: Sequence[Worker]) -> PoolVerdict:
        if self._can_be_spared(pool):
            return PoolVerdict(True, self._token_age_s(workers), THE_OTHERS_SERVE)
        if not self._has_worker(pool):
            return PoolVerdict(False, self._token_age_s(workers), "no worker is connected and accepting work")
        age_s = self._token_age_s(workers)
        return PoolVerdict(age_s is not None and age_s <= RECENT_S, age_s)

    def _has_worker(self, pool: Pool) -> bool:
        return any(worker.usable for worker in self._pools()[pool])

    def _can_be_spared(self, pool: Pool) -> bool:
        """Return whether a pool was drained on purpose while another one stays, so that all is still served.

        The workers of a pool that was lost come back; until then the server is not whole.
        """
        gone = {name for name, workers in self._pools().items() if all(worker.leaves for worker in workers)}
        return pool in gone and len(gone) < len(self._pools())

    def _judge(self, workers: Sequence[Worker], problem: str | None, began_s: float, computed: bool) -> PoolVerdict:
        """Judge a pool after the probe. One that computed tokens meanwhile is busy with a long prompt, not stuck."""
        age_s = self._token_age_s(workers)
        progressed = computed or (age_s is not None and self._clock() - age_s >= began_s)
        if problem is None or progressed:
            return PoolVerdict(True, age_s)
        since = "since the start" if age_s is None else f"for {age_s:.0f} s"
        return PoolVerdict(False, age_s, f"no token {since}: {problem}")

    async def _try_probe(self) -> str | None:
        """Run the probe; return what went wrong, or None."""
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._probe()
        except TimeoutError:
            self._metrics.probes.labels("late").inc()
            return f"the health probe did not end within router.ready_deadline_s ({self._deadline_s:g} s)"
        except (EngineError, NoWorker, DeadlineExceeded) as error:
            self._metrics.probes.labels("failed").inc()
            return f"the health probe failed: {error}"
        self._metrics.probes.labels("ok").inc()
        return None

    def _token_age_s(self, workers: Sequence[Worker]) -> float | None:
        last_s = [worker.client.last_token_s for worker in workers if worker.client.last_token_s is not None]
        return self._clock() - max(last_s) if last_s else None

    def _computed(self) -> dict[Pool, float]:
        """Return how many tokens the engines of each pool have computed, as last reported."""
        return {
            pool: sum(
                value
                for worker in workers
                if worker.status is not None
                for name, value in worker.status.counters.items()
                if name.startswith("tokens_total.")
            )
            for pool, workers in self._pools().items()
        }


@dataclass(frozen=True)
class HealthProbe:
    """Sends probes through the workers."""

    orchestrator: Orchestrator
    vocabulary_size: int
    prompt_tokens: int

    async def __call__(self, emit: Emit = lambda delta: False, output_tokens: int = 2) -> None:
        """Run one probe, and show its tokens to `emit`; raises what any request would."""
        prompt = [random.randrange(self.vocabulary_size) for _ in range(self.prompt_tokens)]
        params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        request = SequenceRequest(
            f"health-probe-{secrets.token_hex(8)}",
            prompt,
            sampling_of(params),
            reasoning_ended=True,
            client=PROBE_CLIENT,
            probe=True,
        )
        await self.orchestrator.run(request, emit)


def probe_prompt_tokens(block_size: int, max_model_len: int) -> int:
    """Return a little more than a KV block: one block is handed off, and no prompt waits long behind a health probe.

    Where a block is as wide as a state, that may be more than a prompt can have.
    """
    return min(block_size + block_size // 4, max_model_len * 3 // 4)


def ready_endpoint(readiness: Readiness, draining: Callable[[], bool]) -> Callable[[Request], Awaitable[JSONResponse]]:
    """Return the endpoint: 200, or 503 naming the pool and the time since its last token, or the shutdown.

    The mode, workers that are lost again and again and a router that is the bottleneck are named either way.
    """

    def told() -> dict[str, str]:
        return {"mode": readiness.mode()} if readiness.mode() else {}

    async def ready(request: Request) -> JSONResponse:
        if draining():
            why = "the server is shutting down and accepts nothing new"
            return JSONResponse({"ready": False, **told(), "why": why}, HTTPStatus.SERVICE_UNAVAILABLE)
        verdict = await readiness.check()
        all_ready = all(pool.ready for pool in verdict.values())
        status = HTTPStatus.OK if all_ready else HTTPStatus.SERVICE_UNAVAILABLE
        pools = {name: _json(pool) for name, pool in verdict.items()}
        away = {"away": dict(readiness.away())} if readiness.away() else {}
        late = {"router": readiness.late()} if readiness.late() else {}
        return JSONResponse({"ready": all_ready, **told(), "pools": pools, **away, **late}, status)

    return ready


def _json(pool: PoolVerdict) -> dict[str, Any]:
    age = {} if pool.last_token_s_ago is None else {"last_token_s_ago": round(pool.last_token_s_ago, 1)}
    return {"ready": pool.ready, **age, **({"why": pool.why} if pool.why else {})}
