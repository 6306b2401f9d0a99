"""What watches the traffic: comparisons of policies in mode `adaptive`, and recordings.

Comparisons run a little at a time, beside everything else of a process. A recording streams what happens to the
scheduler of this process, as lines, to somebody who keeps it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from ridgeline.contracts.vocabulary import Mode, Pool
from ridgeline.contracts.workers import StepModel
from ridgeline.router.fleet.fleet import Fleet
from ridgeline.router.fleet.roles import RoleTable
from ridgeline.router.fleet.worker import Worker
from ridgeline.router.placement.choice import any_model, whole_model
from ridgeline.router.placement.learned import Learned
from ridgeline.router.placement.pool_queue import QueueNow
from ridgeline.router.scheduler.adaptive import Adaptive
from ridgeline.router.scheduler.features import FleetModel, PoolLimits, WorkerSpec, window_tokens
from ridgeline.router.scheduler.offline_simulation import PURE, Served
from ridgeline.router.scheduler.policies import ADAPTIVE
from ridgeline.router.scheduler.recorded_events import AnyEvent, FleetSeen, ModeBecame, Stopped, line_of
from ridgeline.router.scheduler.sizing import LatestLoad
from ridgeline.router.scheduler.traffic import Traffic
from ridgeline.router.settings import RouterConfig

LOOK_EVERY_S = 1.0
PAUSE_S = 0.002
"""Between two parts of a comparison, which take about half a millisecond each: streams go first."""
RECORD_EVERY_S: Final = 0.25
FLEET_EVERY_S: Final = 10.0
MOST_UNREAD_BYTES: Final = 16 << 20
"""A reader that is so far behind gets no more."""
logger = logging.getLogger(__name__)


class Wanted(msgspec.Struct, frozen=True):
    """How much to record."""

    seconds: float
    most_bytes: int


class _Unread:
    """Lines that the reader has not taken."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self.size_bytes = 0
        self.is_behind = False

    def add(self, event: AnyEvent) -> None:
        """Add a line, unless the reader is too far behind."""
        if self.size_bytes > MOST_UNREAD_BYTES:
            self.is_behind = True
            return
        line = line_of(event)
        self._lines.append(line)
        self.size_bytes += len(line)

    def take(self) -> bytes:
        """Return all of them."""
        lines, self._lines, self.size_bytes = b"".join(self._lines), [], 0
        return lines


async def recording(
    wanted: Wanted,
    policy: Adaptive,
    traffic: Traffic,
    mode: Callable[[], Mode],
    fleet: Callable[[], FleetModel | None],
) -> AsyncGenerator[bytes, None]:
    """Yield lines until so much is recorded, or the reader leaves; the last one says why it ended."""
    unread, now_mode, fleet_s = _Unread(), mode(), traffic.clock()
    unread.add(policy.state(now_mode))
    traffic.listeners.append(unread.add)
    sent_bytes, ends_s = 0, traffic.clock() + wanted.seconds
    try:
        while True:
            if mode() != now_mode:
                now_mode = mode()
                unread.add(ModeBecame(traffic.clock(), now_mode))
            if traffic.clock() >= fleet_s + FLEET_EVERY_S and (known := fleet()):
                fleet_s = traffic.clock()
                unread.add(FleetSeen(fleet_s, known))
            if lines := unread.take():
                sent_bytes += len(lines)
                yield lines
            why = _why_ended(unread, sent_bytes >= wanted.most_bytes, traffic.clock() >= ends_s)
            if why:
                yield line_of(Stopped(traffic.clock(), why))
                return
            await asyncio.sleep(RECORD_EVERY_S)
    finally:
        traffic.listeners.remove(unread.add)


def _why_ended(unread: _Unread, is_full: bool, is_over: bool) -> str:
    if unread.is_behind:
        return "the reader was too slow"
    return "the limit of bytes" * is_full or "the time is over" * is_over


class Comparing:
    """The policy of mode adaptive, and the task that has it follow the traffic."""

    def __init__(self, fleet: Fleet, learned: Learned, settings: RouterConfig) -> None:
        self._fleet, self._learned = fleet, learned
        self._traffic, self._since_s = learned.traffic, learned.traffic.clock()
        chosen = settings.policy
        always = None if chosen.name == ADAPTIVE else (chosen.name, chosen.options)
        self._always, self._divides = always, settings.rebalance == "act"
        self._model = partial(fleet_model, fleet, learned, settings.prefill_window_tokens)
        self.policy = Adaptive(self._model, self._traffic, settings.rebalance, always)

    async def run(self) -> None:
        """Compare policies whenever that is due, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Compare policies in mode adaptive if that is due."""
        if self._fleet.mode != "adaptive":
            self.policy.serves_since(self._traffic.arrived_requests)
            return
        if self.policy.is_due():
            await self._compare()
        self.tell_affinities()

    def record(self, wanted: Wanted) -> AsyncGenerator[bytes, None]:
        """Return the lines of what happens from now on."""
        return recording(wanted, self.policy, self._traffic, lambda: self._fleet.mode, self._model)

    def load(self, window_s: float, queues: Mapping[Pool, QueueNow]) -> LatestLoad:
        """Return the requests of the last so many seconds, and what is known of the workers in the present mode."""
        mode, traffic = self._fleet.mode, self._traffic
        since_s = traffic.clock() - window_s
        on_workers_tokens = sum(queue.on_workers_tokens for queue in queues.values())
        on_workers = round(on_workers_tokens / self._learned.prompt_tokens)
        requests = [
            Served(
                one.arrival_s - since_s,
                one.prompt_tokens,
                one.made_tokens if one.ended else max(1, round(one.expected_tokens)),
                one.ttft_slo_s,
                one.tpot_slo_s,
            )
            for one in traffic.latest
            if one.arrival_s >= since_s
        ]
        return LatestLoad(
            mode,
            tuple(one.pool for one in _staying(self._fleet)),
            self._model(mode=mode),
            tuple(requests),
            is_whole=self._since_s <= since_s,
            waiting_prompts=on_workers + sum(queue.waiting.prompts for queue in queues.values()),
            waiting_tokens=on_workers_tokens + sum(queue.waiting.tokens for queue in queues.values()),
            policy=self._always,
            may_divide=self._divides,
        )

    def tell_affinities(self) -> None:
        """Have each worker say which phase it is for: policies divide those that serve, and the others have none."""
        workers = self._fleet.pool("adaptive")
        phases = iter(self.policy.affinities(sum(worker.usable for worker in workers)))
        for worker in workers:
            worker.outstanding.favours = next(phases) if worker.usable else None

    async def _compare(self) -> None:
        before, advised = self.policy.name, self.policy.advised
        for _ in self.policy.compare():
            await asyncio.sleep(PAUSE_S)
        scores = ", ".join(f"{name} {score:.0%}" for name, score in self.policy.scores.items())
        if self.policy.advised not in (advised, self.policy.name):
            logger.info("policy %r would serve better than %r (%s)", self.policy.advised, self.policy.name, scores)
        if self.policy.name != before:
            logger.info("mode adaptive serves by policy %r now, by %r before (%s)", self.policy.name, before, scores)


def _staying(fleet: Fleet) -> list[Worker]:
    return [worker for worker in fleet.workers if worker.usable and not worker.leaves]


def fleet_model(fleet: Fleet, learned: Learned, most_tokens: int | None, mode: Mode = "adaptive") -> FleetModel | None:
    """Return the model of all workers as they are in this mode; None while the steps of none are known.

    A worker has `most_tokens` of prompts at most, if that is set (`router.prefill_window_tokens`).
    """
    there = _staying(fleet)
    whole = any_model(there)
    if whole is None:
        return None
    specs = tuple(_spec(one, whole_model(one, whole), fleet, most_tokens, mode) for one in there)
    return FleetModel(specs, _handover_s(there[0], learned), learned.overhead_s, _fixed_pools(there, fleet.roles))


def _fixed_pools(workers: Sequence[Worker], roles: RoleTable) -> dict[Pool, PoolLimits]:
    """Return the limits of the pools that the workers make in modes colocated and disaggregated."""
    found: dict[Pool, PoolLimits] = {}
    for mode in PURE:
        for one in workers:
            role = roles.role_of(one.worker_id, one.description.pool, mode, 0)
            if role is not None:
                number = found[role.pool].workers + 1 if role.pool in found else 1
                found[role.pool] = PoolLimits(number, role.max_num_batched_tokens, role.max_num_seqs)
    return found


def _spec(worker: Worker, model: StepModel, fleet: Fleet, most_tokens: int | None, mode: Mode) -> WorkerSpec:
    known = worker.description
    role = fleet.roles.role_of(worker.worker_id, known.pool, mode, 0) or worker.role
    step_tokens = role.max_num_batched_tokens if role else known.max_model_len
    window = window_tokens(model, step_tokens)
    return WorkerSpec(
        worker.worker_id,
        model,
        step_tokens,
        window_tokens=window if most_tokens is None else min(most_tokens, window),
        max_num_seqs=role.max_num_seqs if role else known.max_num_seqs,
        kv_tokens=known.num_kv_blocks * known.max_model_len // known.layout.blocks_of(known.max_model_len),
        device="/".join(worker.device or ()),
    )


def _handover_s(worker: Worker, learned: Learned) -> float:
    """Return the seconds of the usual prompt's KV on its way; of an overlapped hand-off the end alone would count."""
    layout = worker.description.layout
    block_bytes = layout.block_bytes * layout.num_layers * layout.tensor_parallel_size
    return layout.blocks_of(round(learned.prompt_tokens)) * block_bytes / learned.mean_bytes_per_s
