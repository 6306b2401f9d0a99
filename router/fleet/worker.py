"""One connected worker: its status, polled regularly, and what this router has outstanding there.

`ridgeline.router.fleet.fleet` creates it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Self

import msgspec

from ridgeline.contracts.errors import WorkerLost
from ridgeline.contracts.vocabulary import Phase, Pool
from ridgeline.contracts.workers import MIN_FITTED_STEPS, Role, StepModel, WorkerDescription, WorkerStatus
from ridgeline.worker_runtime.client import STATUS_DEADLINE_S, WorkerClient

logger = logging.getLogger(__name__)
STATUS_INTERVAL_S = 0.5
IDLE_INTERVALS = 2
"""Factor on the interval for a worker without work, which reports a change of its health itself. One that hangs is
still found within 5 s, because a status request without an answer is repeated at once."""
UNANSWERED_S = 4.0
"""Two status requests in a row, of 2 s each (`ridgeline.worker_runtime.client`)."""
LATE_S = 0.25
"""If a request's end is noticed this long after its deadline, the router was stuck, not the worker."""
STALL_TIMEOUT_S = 60.0
AT_MOST_DONE = 0.95
"""The part of a prompt that may be taken as computed while its first token has not come."""
STALLED_PART = 1 / 3
"""A worker whose engine has work but no step for this fraction of `supervision.stall_timeout_s` gets no new work."""
SPARE_FRACTION = 0.25
"""The fraction of a decode worker's KV blocks that prompts must leave free before they are prefilled."""
OnNews = Callable[[], object]


class Outstanding(msgspec.Struct):
    """What is outstanding on a worker."""

    prompt_tokens: int = 0
    """Prompt tokens sent there for prefill whose first token has not come back."""
    promised_blocks: int = 0
    """KV blocks for sequences that have produced nothing yet."""
    held_blocks: int = 0
    """KV blocks for the prompts of all sequences that have not finished."""
    running: int = 0
    """Sequences sent there that have not finished."""
    decodes: int = 0
    """Sequences that it decodes, or will once their prompts are computed."""
    decoding: int = 0
    """Those of them that have begun."""
    context_tokens: int = 0
    """Tokens of the contexts of `decodes`, half of each answer included."""
    favours: Phase | None = None
    """The phase that it is kept for (`ridgeline.router.scheduler.adaptive`); None: it does both."""


class Worker:
    """One worker, and what this router has outstanding there. `on_news` is called after each answer."""

    def __init__(
        self,
        client: WorkerClient,
        description: WorkerDescription,
        on_news: OnNews = lambda: None,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        *,
        gives_role: bool = True,
    ) -> None:
        """`gives_role`: whether to tell the worker its role."""
        self._gives_role = gives_role
        self.client = client
        self.description = description
        self.worker_id = description.worker_id
        """The worker's name in logs, metrics and tables."""
        device = description.node, description.device
        self.device = device if all(device) else None
        """What it shares with every other worker for which this is the same; None if not known."""
        self.role: Role | None = None
        """What it is for; None: what it was started for. Set by `assign`."""
        self.pool: Pool = description.pool
        """The pool it belongs to at present. Set by `assign`."""
        self.status: WorkerStatus | None = None
        self._counted: dict[Pool, dict[str, float]] = {}
        self._counted_until: Mapping[str, float] = {}
        """The worker's counters at its last answer."""
        self._told = ""
        """The state that was logged last."""
        self.answers = True
        """Whether it answers status requests; one that hangs gets no new work."""
        self.leaves = False
        """Whether it has reported that it drains; this incarnation never comes back."""
        self.held_back = False
        """Whether it must not get work yet, because the workers it will exchange KV with are still pairing."""
        self.pairing = asyncio.Lock()
        """Held during pairing requests, so that the last one it gets is the newest."""
        self._on_news = on_news
        self._stalled_s = STALLED_PART * stall_timeout_s
        self._question: asyncio.Task[None] | None = None
        self._known_s = float("-inf")
        """When the request that `status` answers was sent."""
        self._silent_since_s = time.monotonic()
        """Time of its last answer, or of this router's last discovery that it had been stuck itself."""
        self._unreached_since_s: float | None = None
        self._unreached_until_s = 0.0
        """When it was asked in vain the last time: what this router did not ask, it cannot know."""
        self.adapters = WorkerAdapters(description)
        self.prompts = PendingPrompts()
        self.outstanding = Outstanding()
        """What `reserve` has counted here; in one of several routers, what their dispatcher has."""

    def assign(self, role: Role | None) -> None:
        """Change what it is for; None: what it was started for. It is told with the next status request."""
        self.role, self.pool = role, role.pool if role else self.description.pool

    @property
    def title(self) -> str:
        """Its id and its pool, for sentences that people read."""
        return f"{self.worker_id} ({self.pool})"

    @property
    def favours(self) -> Phase | None:
        """The phase that it is kept for in mode adaptive; None: it does both."""
        return self.outstanding.favours

    @property
    def has_its_role(self) -> bool:
        """Whether its engine has the limits of its role, by its last answer."""
        return self.role is None or (self.status is not None and self.status.role_number == self.role.number)

    @property
    def max_num_seqs(self) -> int:
        """Sequences that its engine runs at a time."""
        return self.role.max_num_seqs if self.role else self.description.max_num_seqs

    @property
    def counted(self) -> Mapping[Pool, Mapping[str, float]]:
        """Its counters by the pool in which they grew; empty while it does not answer."""
        return self._counted if self.status is not None else {}

    def _count(self, counters: Mapping[str, float]) -> None:
        here = self._counted.setdefault(self.pool, {})
        for name, value in counters.items():
            here[name] = here.get(name, 0.0) + value - self._counted_until.get(name, 0.0)
        self._counted_until = counters

    @property
    def kv_blocks_free(self) -> int:
        """KV blocks that no sequence had at its last answer."""
        return self.status.kv_blocks_free if self.status else self.description.num_kv_blocks

    def has_room(self, blocks: int) -> bool:
        """Return whether its free, unpromised KV blocks and its batch have room for one more sequence."""
        left = self.kv_blocks_free - self.outstanding.promised_blocks - blocks
        return left >= 0 and self.outstanding.running < self.max_num_seqs

    def has_room_to_overlap(self, blocks: int) -> bool:
        """Return whether a prompt may hold blocks here during its prefill without starving decode.

        Many prompts can begin between two reports of a worker, so what was promised here counts as held.
        """
        held = max(blocks, self.outstanding.promised_blocks)
        return self.kv_blocks_free - held >= SPARE_FRACTION * self.description.num_kv_blocks

    @property
    def usable(self) -> bool:
        """Whether it serves, as far as is known."""
        return self.client.connected and self.healthy and not self.drains

    @property
    def takes_work(self) -> bool:
        """Whether it may get new work now."""
        return self.usable and not self.in_doubt

    @property
    def in_doubt(self) -> bool:
        """Whether it has failed or refused a request since its last report; its status is being asked for."""
        return self.client.failed_s > self._known_s

    @property
    def drains(self) -> bool:
        """Whether it takes no more requests and ends those that it has, by its last report."""
        return self.status.draining if self.status else False

    @property
    def healthy(self) -> bool:
        """Whether its engine runs, by its last report."""
        if self.held_back or not self.answers:
            return False
        return not (self.status and (self.status.engine_failed or self.status.stalled_s > self._stalled_s))

    @property
    def reached(self) -> bool:
        """Whether this router has a stream from it, and answers."""
        return self.client.connected and self.answers

    @property
    def unreached_s(self) -> float:
        """Seconds for which this router has asked it in vain, or has had no stream from it."""
        return 0.0 if self._unreached_since_s is None else self._unreached_until_s - self._unreached_since_s

    async def keep_fresh(self) -> None:
        """Ask for its status twice a second, and at once when its connection or a request there breaks.

        An idle worker is asked half as often, and at once when it reports that its health has changed.
        """
        while True:
            self.client.news.clear()
            known_s, asked_s = self._known_s, time.monotonic()
            await self.refresh()
            if self._known_s > known_s:
                pause_s = STATUS_INTERVAL_S * (IDLE_INTERVALS if self._is_idle() else 1)
            else:
                pause_s = asked_s + STATUS_INTERVAL_S - time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, pause_s)):
                    await self.client.news.wait()

    def _is_idle(self) -> bool:
        return not self.outstanding.running and self.status is not None and not self.status.tasks

    async def refresh(self) -> None:
        """Update the status. However many ask, there is one request at a time, and its answer serves all."""
        if self._question is not None:  # sent before we asked, so its answer may be too old
            await asyncio.shield(self._question)
        if self._question is None:
            self._question = asyncio.create_task(self._ask(), name=f"status-{self.worker_id}")
        await asyncio.shield(self._question)

    async def _ask(self) -> None:
        """Ask once. A request that is not answered in time may be this router's own fault, and then does not count."""
        sent_s, reached = time.monotonic(), False
        try:
            status = self.status = await self.client.status()
            self._count(status.counters)
            if self._gives_role and not self.has_its_role and self.role is not None:
                await self.client.take_role(self.role)
        except WorkerLost:
            now_s = time.monotonic()
            if now_s - sent_s >= STATUS_DEADLINE_S + LATE_S:
                self._silent_since_s = now_s
                self._unreached_since_s = None
            heard_s = max(self._silent_since_s, self.client.last_token_s or 0.0)  # a worker that sends tokens is there
            if not self.client.connected or now_s - heard_s >= UNANSWERED_S:
                self.status, self.answers = None, False
        else:
            self.answers, self._silent_since_s, self._known_s = True, time.monotonic(), sent_s
            self.leaves = self.leaves or status.draining
            reached = self.client.connected
        finally:
            self._question = None
        if reached:
            self._unreached_since_s = None
        else:
            self._unreached_until_s = time.monotonic()
            if self._unreached_since_s is None:
                self._unreached_since_s = self._unreached_until_s
        if (state := state_of(self)) != self._told:
            self._told = state
            facts = {"worker": self.worker_id, "pool": self.pool, "incarnation": self.description.incarnation}
            logger.info("worker is %s", state, extra=facts)
        self._on_news()

    def reserve(
        self,
        prompt_tokens: int = 0,
        promised_blocks: int = 0,
        held_blocks: int = 0,
        *,
        decode_context_tokens: int = 0,
        last_block: int | None = None,
        adapter: str = "",
    ) -> Reservation:
        """Count a sequence against this worker until the reservation is closed.

        Prompt tokens and promised blocks count until `prompt_done`, the held blocks of its prompt until the end. If the
        worker will decode it, `decode_context_tokens` are its context's, half of its answer included.
        `last_block` is the hash of the last whole block of the prompt. `adapter` is the key of its LoRA adapter.
        """
        return Reservation(
            self, prompt_tokens, promised_blocks, held_blocks, decode_context_tokens, last_block, adapter
        )

    @property
    def step_model(self) -> StepModel | None:
        """The model of its steps, if it has run enough of them."""
        model = self.status.step_model if self.status else None
        return model if model is not None and model.steps >= MIN_FITTED_STEPS else None

    def begin_prompt(self, prompt: Reservation) -> None:
        """Count the prompt as the last one to be computed, for `Reservation`."""
        self.prompts.begin(prompt)
        self.outstanding.prompt_tokens += prompt.prompt_tokens

    def end_prompt(self, prompt: Reservation) -> None:
        """No longer count the prompt, for `Reservation`."""
        self.prompts.end(prompt)
        self.outstanding.prompt_tokens -= prompt.prompt_tokens


def state_of(worker: Worker) -> str:
    """Return "usable", or the first reason why the worker is not."""
    if not worker.client.connected:
        return "detached"
    if not worker.healthy:
        return "failed"
    return "draining" if worker.drains else "usable"


class WorkerAdapters:
    """The LoRA adapters of one worker, by their keys; "" is the model alone."""

    def __init__(self, description: WorkerDescription) -> None:
        self.loaded = {adapter.key for adapter in description.adapters}
        """Those that it can be asked for."""
        self._places, self._kept = description.max_loras, description.max_cpu_loras
        self._running: Counter[str] = Counter()
        """Those of sequences there that have not ended."""
        self._in_memory: OrderedDict[str, None] = OrderedDict()
        """The last ones that it was asked for, as many as it keeps in memory; the latest is last."""

    def load(self, key: str) -> None:
        """Record that it has taken one in, which it then has in memory."""
        self.loaded.add(key)
        self._use(key)

    def has_place_for(self, key: str) -> bool:
        """Return whether its steps have a place for a sequence with this one."""
        return not key or key in self._running or len(self._running) < self._places

    def must_read(self, key: str) -> bool:
        """Return whether it would have to read this one from disk first, as far as is known."""
        return bool(key) and key not in self._in_memory

    def count(self, key: str, number: int) -> None:
        """Count one more sequence with this one (1), or one less (-1)."""
        self._running[key] += number
        if not self._running[key]:
            del self._running[key]
        if number > 0:
            self._use(key)

    def _use(self, key: str) -> None:
        self._in_memory[key] = None
        self._in_memory.move_to_end(key)
        while len(self._in_memory) > self._kept:
            self._in_memory.popitem(last=False)


class PendingPrompts:
    """The prompts that a worker still has to compute, in their order."""

    def __init__(self) -> None:
        self.last_blocks: Counter[int] = Counter()
        """The hashes of their last whole blocks: another sequence of one of these prompts can share its KV."""
        self._prompts: dict[Reservation, None] = {}
        self._tokens, self._attends = 0, 0.0
        """Their tokens, and what these attend to, summed."""
        self._first_since_s = 0.0
        """When the worker began with the first of them."""

    def begin(self, prompt: Reservation) -> None:
        """Add one."""
        if not self._prompts:
            self._first_since_s = time.monotonic()
        self._prompts[prompt] = None
        self._tokens += prompt.prompt_tokens
        self._attends += prompt.attends
        if prompt.last_block is not None:
            self.last_blocks[prompt.last_block] += 1

    def end(self, prompt: Reservation) -> None:
        """Remove one, which is computed or given up."""
        was_first = next(iter(self._prompts)) is prompt
        del self._prompts[prompt]
        self._tokens -= prompt.prompt_tokens
        self._attends -= prompt.attends
        if prompt.last_block is not None:
            self.last_blocks -= Counter((prompt.last_block,))
        if was_first:
            self._first_since_s = time.monotonic()

    def left(self, model: StepModel) -> tuple[float, float]:
        """Return the prompt tokens still to be computed, and what they attend to, summed over them.

        Of the first one, as much counts as done as it would have computed since it began, alone.
        """
        first = next(iter(self._prompts), None)
        if first is None:
            return 0.0, 0.0
        takes_s = model.step_s(first.prompt_tokens, 0, 0, first.attends)
        done = min(AT_MOST_DONE, (time.monotonic() - self._first_since_s) / takes_s)
        return self._tokens - done * first.prompt_tokens, self._attends - done * first.attends


class Reservation:
    """What a sequence counts as on a worker, until `close` or the end of a `with` block."""

    def __init__(
        self,
        worker: Worker,
        prompt_tokens: int,
        promised_blocks: int,
        held_blocks: int,
        decode_context_tokens: int,
        last_block: int | None,
        adapter: str = "",
    ) -> None:
        """See `Worker.reserve`."""
        self._adapter = adapter
        self.last_block = last_block
        self.prompt_tokens = prompt_tokens
        self.attends = prompt_tokens**2 / 2
        """What its tokens attend to, summed."""
        self._worker = worker
        self._promised_blocks, self._held_blocks = promised_blocks, held_blocks
        self._context_tokens, self._decodes = decode_context_tokens, decode_context_tokens > 0
        self._open, self._waits, self._decoding = True, True, False
        worker.outstanding.promised_blocks += promised_blocks
        self._count(1)
        if prompt_tokens:
            worker.begin_prompt(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prompt_done(self) -> None:
        """Record that the first token has arrived. May be called twice."""
        if self._waits:
            self._end_waiting()
            self.first_token_made()

    def first_token_made(self) -> None:
        """Record that the sequence decodes now, or will as soon as its KV has come. May be called twice."""
        if self._open and self._decodes and not self._decoding:
            self._decoding = True
            self._worker.outstanding.decoding += 1

    def close(self) -> None:
        """Record that the sequence has left. May be called twice."""
        if not self._open:
            return
        if self._waits:
            self._end_waiting()
        self._open = False
        self._count(-1)
        self._worker.outstanding.decoding -= self._decoding

    def _count(self, number: int) -> None:
        now = self._worker.outstanding
        now.running += number
        now.held_blocks += number * self._held_blocks
        now.decodes += number * self._decodes
        now.context_tokens += number * self._context_tokens
        if self._adapter:
            self._worker.adapters.count(self._adapter, number)

    def _end_waiting(self) -> None:
        self._waits = False
        self._worker.outstanding.promised_blocks -= self._promised_blocks
        if self.prompt_tokens:
            self._worker.end_prompt(self)
