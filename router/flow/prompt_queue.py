"""Prompts wait here, in the router, until a worker of their pool has room: fair among clients, and bounded.

An engine runs prompts in order of arrival, so what was sent there cannot be reordered. A worker therefore gets a prompt
only while the prompt tokens it still has to compute are below a window; the others wait in a `FairQueue`. A prompt also
waits while its client may not have one more sequence decoded (`DecodeSlots`).

**Bound.** In a pool of one worker, with window W, quantum Q and longest prompt L: a short prompt (up to Q tokens) of a
client with nothing else waiting starts after at most W + L tokens that the worker already has, and Q + L tokens of each
other client with prompts waiting. With more workers it starts sooner.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec.structs import replace

from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.fleet.fleet import Fleet, Worker
from ridgeline.router.fleet.policy import (
    Demand,
    NoWorker,
    Rerouted,
    blocks_needed,
    context_tokens,
    pools_of,
    prompt_blocks,
)
from ridgeline.router.flow.choice import ByPolicy, ByScore, Choice, Chooser
from ridgeline.router.flow.client_prompts import Entry
from ridgeline.router.flow.decode_slots import DecodeSlot, DecodeSlots
from ridgeline.router.flow.fair_queue import FairQueue, Waiting
from ridgeline.router.flow.learned import Learned
from ridgeline.router.flow.rates import ServiceRate
from ridgeline.router.scheduler.adaptive import Adaptive
from ridgeline.router.scheduler.features import Assignment
from ridgeline.router.settings import RouterSettings

logger = logging.getLogger(__name__)

SUBSTITUTED_PATIENCE_S = 2.0
"""Prompts whose pool is lost wait this long if the workers of another pool can serve them whole meanwhile."""
RECHECK_S = 0.25
"""Interval of checks while prompts wait for a pool without a usable worker."""


class DecodeSeat:
    """A sequence's place on the worker that decodes it after a hand-off."""

    def __init__(self, worker: Worker, demand: Demand, slot: DecodeSlot) -> None:
        """Count the sequence there, with its slot, until `close`."""
        self.worker = worker
        self._slot = slot
        self._counted = ExitStack()
        slot.on(worker)
        block_size_tokens = worker.description.block_size_tokens
        self._reservation = self._counted.enter_context(
            worker.reserve(
                promised_blocks=blocks_needed(demand, block_size_tokens),
                held_blocks=prompt_blocks(demand, block_size_tokens),
                decode_context_tokens=context_tokens(demand),
            )
        )

    def first_token_made(self) -> None:
        """Record that the sequence has its first token, and decodes as soon as its KV has come. May be called twice."""
        self._reservation.first_token_made()

    def began(self) -> None:
        """Record that it has sent a token, and so reports its blocks. May be called twice."""
        self._reservation.prompt_done()

    def close(self) -> None:
        """Record that the sequence has left. May be called twice."""
        self._counted.close()
        self._slot.release()


class PromptTurn:
    """A prompt's place on a worker, and its sequence's place where it is decoded.

    It counts as a sequence on the worker, and as prompt tokens until `prompt_done`.
    """

    def __init__(
        self,
        queue: PromptQueue,
        worker: Worker,
        demand: Demand,
        slot: DecodeSlot,
        *,
        decode_worker: Worker | None = None,
        assignment: Assignment | None = None,
    ) -> None:
        """`decode_worker` is the worker that decodes, as far as it is known: `worker` itself if it gets all."""
        self.worker = worker
        self.demand = demand
        self.assignment = assignment
        """Why these workers, if a policy chose them."""
        self._queue = queue
        self._counted = ExitStack()
        block_size_tokens = worker.description.block_size_tokens
        decodes_here = decode_worker is worker
        blocks = prompt_blocks(demand, block_size_tokens) if decodes_here else 0
        self._reservation = self._counted.enter_context(
            worker.reserve(
                demand.prompt_tokens - (assignment.cached_tokens if assignment else 0),
                blocks,
                blocks,
                decode_context_tokens=context_tokens(demand) if decodes_here else 0,
                last_block=demand.prefix[-1] if demand.prefix else None,
            )
        )
        self._slot: DecodeSlot | None = slot
        self._decode: DecodeSeat | None = None
        if decodes_here:
            slot.on(worker)
        elif decode_worker is not None:
            self._decode = DecodeSeat(decode_worker, demand, self._take_slot())
        self._open = True

    def prompt_done(self) -> None:
        """Record that the first token has arrived, so that another prompt may go to this worker.

        May be called twice.
        """
        self._end(computed=True)

    def close(self) -> None:
        """Record that the sequence has left the worker. May be called twice."""
        self._counted.close()
        self._end(computed=False)
        if self._slot is not None:
            self._take_slot().release()
        if self._decode is not None:
            self.take_decode().close()

    @property
    def splits(self) -> bool:
        """Whether another worker has been chosen that decodes."""
        return self._decode is not None

    def decode_on(self, worker: Worker) -> DecodeSeat:
        """Return a place on this worker, which decodes. Call it at most once; the caller must close it."""
        return DecodeSeat(worker, self.demand, self._take_slot())

    def take_decode(self) -> DecodeSeat:
        """Return the place on the worker that was chosen for decode. Call it once; the caller must close it."""
        assert self._decode is not None
        decode, self._decode = self._decode, None
        return decode

    def _take_slot(self) -> DecodeSlot:
        assert self._slot is not None
        slot, self._slot = self._slot, None
        return slot

    def _end(self, computed: bool) -> None:
        if self._open:
            self._open = False
            self._reservation.prompt_done()
            self._queue.ended(self, computed)


class QueueNow(msgspec.Struct, frozen=True):
    """A pool's queue at one moment."""

    waiting: Waiting
    on_workers_tokens: int
    """Prompt tokens that the workers still have to compute."""
    starts_at_once: bool
    """Whether nothing waits and a worker has room."""
    tokens_per_s: float | None
    """Prompt tokens that the whole pool computes per second; None until measured."""

    def wait_s(self, client: str, prompt_tokens: int, prompts: int = 1) -> float | None:
        """Estimate the seconds that the last of `prompts` prompts of this client would wait; None until measured.

        `prompt_tokens` is the length of each. A prompt that a worker would take at once does not wait, however slow the
        pool was when last measured: else a low rate would keep away the prompts that correct it.
        """
        if self.tokens_per_s is None:
            return None
        siblings_tokens = (prompts - 1) * prompt_tokens
        if self.starts_at_once:
            return siblings_tokens / self.tokens_per_s
        ahead = self.waiting.tokens_ahead(client, prompts * prompt_tokens)
        return (self.on_workers_tokens + ahead + siblings_tokens) / self.tokens_per_s


@dataclass(eq=False, slots=True)
class _Waiting:
    demand: Demand
    decodes_here: bool
    granted: asyncio.Future[PromptTurn]
    pushed_s: float
    urgent: bool
    held_s: float = 0.0
    """See `Assignment`."""


class PromptQueue:
    """The waiting prompts of one pool."""

    def __init__(
        self,
        pool: Pool,
        workers: Callable[[], Sequence[Worker]],
        window_tokens: int,
        recovery_timeout_s: float,
        slots: DecodeSlots,
        clock: Callable[[], float] = time.monotonic,
        has_substitute: Callable[[], bool] = lambda: False,
        chooser: Chooser | None = None,
    ) -> None:
        """Make an empty queue of one pool.

        `has_substitute` says whether the workers of another pool can serve whole requests now; `chooser` chooses a
        prompt's workers, by default by their scores.
        """
        self._by_score = ByScore(pool)
        self._chooser = chooser or self._by_score
        self.pool: Pool = pool
        self._has_substitute = has_substitute
        self._workers = workers
        self._slots = slots
        slots.tell(self.dispatch)
        self._window_tokens = window_tokens
        self._recovery_timeout_s = recovery_timeout_s
        self._clock = clock
        self._queue: FairQueue[_Waiting] = FairQueue()
        self._rate = ServiceRate(clock, window_tokens)
        self._unusable_since_s: float | None = None
        self._recheck: asyncio.TimerHandle | None = None
        self._held: _Waiting | None = None
        """The prompt that waits although a worker would take it."""
        self._held_since_s = 0.0
        self._aside: list[_Waiting] = []
        """Prompts whose turn came while all workers that their routers reach were full, so that they hold up nobody.
        Once there is room they and the others go in turn, so that neither keep the other waiting."""
        self._aside_went_last = False

    @asynccontextmanager
    async def turn(self, demand: Demand, *, decodes_here: bool, urgent: bool = False) -> AsyncIterator[PromptTurn]:
        """Wait for a worker, and count this sequence there while the block runs.

        An `urgent` prompt goes before all others. With `decodes_here` the worker gets the whole request, unless another
        one is chosen to decode with it. Raises
        Rerouted if the pool has ceased to serve, and NoWorker once it has had no usable worker for
        `recovery_timeout_s` while prompts waited, or for `SUBSTITUTED_PATIENCE_S` if another pool can serve them.
        """
        granted: asyncio.Future[PromptTurn] = asyncio.get_running_loop().create_future()
        entry = self._push(_Waiting(demand, decodes_here, granted, self._clock(), urgent))
        try:
            self.dispatch()
            turn = await granted
        except BaseException:
            self._queue.remove(entry)
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                granted.result().close()  # cancelled on the way here: the place goes to the next prompt
            raise
        try:
            yield turn
        finally:
            turn.close()

    def dispatch(self) -> None:
        """Send the next prompts to their best workers while there is room.

        Call it when the fleet has changed; the queue calls it itself when a place is freed. A fault of the rules ends
        only the prompt that they were asked about, since the first token of any other request may have led here.
        """
        held = None
        while self.waiting and (roomy := self._with_room()):
            may_start, now_s = self._slots.as_of_now(), self._clock()
            asked = self._next(may_start, now_s, roomy)
            if asked is None:  # all waiting clients are over their share of decode
                break
            waited_s = asked.demand.waited_s + now_s - asked.pushed_s
            try:
                choice = self._choose(asked, waited_s, roomy)
            except Exception as error:
                logger.exception("no worker can be chosen for a prompt in pool %s", self.pool)
                self._take(asked, may_start, now_s)
                asked.granted.set_exception(error)
                continue
            if choice is None:  # it waits for a worker that has no room now
                held = asked
                break
            self._take(asked, may_start, now_s)
            self._hold(None)
            self._grant(asked, choice)
        self._hold(held)
        self._watch_outage()

    def seat(
        self,
        demand: Demand,
        worker: Worker,
        decode_worker: Worker | None,
        assignment: Assignment | None = None,
    ) -> PromptTurn:
        """Give a prompt its turn on this worker without any wait; close it. See `PromptTurn`."""
        slot = self._slots.take(demand.client)
        return PromptTurn(self, worker, demand, slot, decode_worker=decode_worker, assignment=assignment)

    def send_away(self) -> int:
        """End the wait of all prompts with Rerouted, in their order; return how many there were."""
        return self._fail_all(Rerouted(f"the {self.pool} pool no longer serves"))

    def ended(self, turn: PromptTurn, computed: bool) -> None:
        """Record that a turn's prompt tokens are no longer outstanding; for `PromptTurn`."""
        worker_id = turn.worker.worker_id
        if not computed:
            self._rate.dropped(worker_id)
            self.dispatch()
            return
        self._rate.finished(worker_id, turn.demand.prompt_tokens)
        self.dispatch()
        if turn.worker.outstanding.prompt_tokens:
            self._rate.begin(worker_id, self._full(turn.worker))

    # --- what admission and metrics read

    @property
    def usable_workers(self) -> int:
        """Number of workers that would take a prompt, now or later."""
        return sum(worker.usable for worker in self._workers())

    @property
    def waiting(self) -> int:
        """Number of prompts that wait here."""
        return len(self._queue) + len(self._aside)

    @property
    def waiting_tokens(self) -> int:
        """Number of tokens of the waiting prompts."""
        return self._queue.waiting.tokens + sum(asked.demand.prompt_tokens for asked in self._aside)

    def forget_all_but(self, worker_ids: Sequence[str]) -> None:
        """Forget what was measured of workers that have left."""
        self._rate.forget_all_but(worker_ids)

    @property
    def tokens_per_s(self) -> float | None:
        """Prompt tokens that the whole pool computes per second; None until measured."""
        rate = self._rate.tokens_per_s
        return None if rate is None else rate * max(1, self.usable_workers)

    def now(self) -> QueueNow:
        """Return what one can know of the queue; `waiting` in it goes on to change."""
        return QueueNow(
            waiting=self._all_waiting(),
            on_workers_tokens=sum(worker.outstanding.prompt_tokens for worker in self._workers()),
            starts_at_once=not len(self._queue) and any(map(self._has_room, self._workers())),
            tokens_per_s=self.tokens_per_s,
        )

    def _all_waiting(self) -> Waiting:
        if not self._aside:
            return self._queue.waiting
        return self._queue.waiting.plus((one.demand.client, one.demand.prompt_tokens) for one in self._aside)

    def wait_s(self, client: str, prompt_tokens: int, prompts: int = 1) -> float | None:
        """Estimate a prompt's wait, see `QueueNow.wait_s`."""
        return None if self._rate.tokens_per_s is None else self.now().wait_s(client, prompt_tokens, prompts)

    # ---

    def _with_room(self) -> list[Worker]:
        """Return the workers whose window is not full."""
        return [worker for worker in self._workers() if self._has_room(worker)]

    def _has_room(self, worker: Worker) -> bool:
        return not self._full(worker) and worker.takes_work

    def _next(self, may_start: Callable[[str], bool], now_s: float, roomy: Sequence[Worker]) -> _Waiting | None:
        """Return the prompt that is next, after setting aside those before it that reach only full workers."""
        aside = self._next_aside(may_start, roomy)
        if aside is not None and not self._aside_went_last:
            return aside
        while (entry := self._queue.peek(may_start, now_s)) is not None:
            if entry.item.granted.done():  # its client has left: do not choose a worker for it
                self._queue.remove(entry)
            elif self._reaches_only_full_ones(entry.item, roomy):
                self._aside.append(self._queue.pop(may_start, now_s).item)
            else:
                return entry.item
        return aside

    def _next_aside(self, may_start: Callable[[str], bool], roomy: Sequence[Worker]) -> _Waiting | None:
        """Return the first prompt that was set aside and may go now."""
        self._aside = [asked for asked in self._aside if not asked.granted.done()]
        for asked in self._aside:
            if (asked.urgent or may_start(asked.demand.client)) and not self._reaches_only_full_ones(asked, roomy):
                return asked
        return None

    def _reaches_only_full_ones(self, asked: _Waiting, roomy: Sequence[Worker]) -> bool:
        """Return whether its router reaches workers, and all are full. One that reaches none finds that out itself."""
        avoided = asked.demand.avoided
        if not avoided or any(worker.worker_id not in avoided for worker in roomy):
            return False
        return any(worker.takes_work and worker.worker_id not in avoided for worker in self._workers())

    def _take(self, asked: _Waiting, may_start: Callable[[str], bool], now_s: float) -> None:
        """Take out the prompt that is next."""
        self._aside_went_last = asked in self._aside
        if self._aside_went_last:
            self._aside.remove(asked)
        else:
            self._queue.pop(may_start, now_s)

    def _push(self, waiting: _Waiting) -> Entry[_Waiting]:
        """Put a prompt into the queue, with the time by which it must start if its first token is to be in time."""
        demand, deadline_s, latest_s = waiting.demand, None, None
        least_s = self._chooser.least_s(demand)
        if least_s is not None and math.isfinite(demand.ttft_limit_s):
            deadline_s = waiting.pushed_s - demand.waited_s + demand.ttft_limit_s
            latest_s = deadline_s - least_s
        return self._queue.push(
            demand.client,
            demand.prompt_tokens,
            waiting,
            urgent=waiting.urgent,
            deadline_s=deadline_s,
            latest_start_s=latest_s,
        )

    def _full(self, worker: Worker) -> bool:
        return worker.outstanding.prompt_tokens >= self._window_tokens

    def _choose(self, asked: _Waiting, waited_s: float, roomy: Sequence[Worker]) -> Choice | None:
        """Return the choice for a prompt, by score if the chooser has a fault."""
        try:
            return self._chooser.choose(asked.demand, waited_s, roomy, urgent=asked.urgent)
        except Exception:
            logger.exception("no prediction for a prompt in pool %s: it goes to the least loaded worker", self.pool)
            return self._by_score.choose(asked.demand, waited_s, roomy, urgent=asked.urgent)

    def _hold(self, waiting: _Waiting | None) -> None:
        """Count the time until now for the prompt that was held back, and from now on for this one."""
        now_s = self._clock()
        if self._held is not None:
            self._held.held_s += now_s - self._held_since_s
        self._held, self._held_since_s = waiting, now_s

    def _grant(self, waiting: _Waiting, choice: Choice) -> None:
        worker, assignment = choice.worker, choice.assignment
        if assignment is not None and waiting.held_s:
            assignment = replace(assignment, held_s=waiting.held_s)
        idle = not worker.outstanding.prompt_tokens
        decode_worker = choice.decode_worker or (worker if waiting.decodes_here else None)
        waiting.granted.set_result(self.seat(waiting.demand, worker, decode_worker, assignment))
        if idle:
            self._rate.begin(worker.worker_id, self._full(worker))

    def _watch_outage(self) -> None:
        """Fail all waiting prompts after a long outage. Poll until then: a worker's return is not always reported."""
        if self._recheck is not None:
            self._recheck.cancel()
            self._recheck = None
        if not self.waiting:
            self._unusable_since_s = None
            return
        if any(worker.usable for worker in self._workers()):
            self._unusable_since_s = None
            self._recheck = asyncio.get_running_loop().call_later(RECHECK_S, self.dispatch)
            return
        now_s = self._clock()
        if self._unusable_since_s is None:
            self._unusable_since_s = now_s
        patience_s = self._recovery_timeout_s
        if self._has_substitute():
            patience_s = min(SUBSTITUTED_PATIENCE_S, patience_s)
        if now_s - self._unusable_since_s < patience_s:
            self._recheck = asyncio.get_running_loop().call_later(RECHECK_S, self.dispatch)
            return
        self._unusable_since_s = None
        self._fail_all(
            NoWorker(
                f"no {self.pool} worker was connected and accepting work for {patience_s:.0f} s "
                "(router.recovery_timeout_s): start one, or find out why they are gone"
            )
        )

    def _fail_all(self, error: Exception) -> int:
        failed, aside, self._aside = 0, self._aside, []
        while aside or len(self._queue):
            granted = (aside.pop(0) if aside else self._queue.pop().item).granted
            if not granted.done():
                granted.set_exception(error)
                failed += 1
        return failed


def prompt_queues(
    fleet: Fleet, settings: RouterSettings, learned: Learned | None = None, policy: Adaptive | None = None
) -> dict[Pool, PromptQueue]:
    """Create a queue for each pool that may compute prompts, in every mode that the deployment can serve.

    In pool `adaptive` prompts go by `policy`. Predictions use what `learned` has been told.
    """
    learned = learned or Learned(settings.block_size_tokens)
    slots = DecodeSlots(fleet.answering)

    def another_serves(pool: Pool) -> bool:
        return any(fleet.usable(other) for other in pools_of(fleet.mode) if other != pool)

    def chooser(pool: Pool) -> Chooser:
        if pool != "adaptive" or policy is None:
            return ByScore(pool)
        return ByPolicy(pool, partial(fleet.pool, pool), learned, policy, settings.router.min_remote_prefill_tokens)

    return {
        pool: PromptQueue(
            pool,
            partial(fleet.pool, pool),
            settings.prefill_window_tokens[pool],
            settings.router.recovery_timeout_s,
            slots,
            has_substitute=partial(another_serves, pool),
            chooser=chooser(pool),
        )
        for pool in fleet.pools
    }
