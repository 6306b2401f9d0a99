"""The host every worker is built on: life cycle, sessions with routers, cancel, drain, status.

`cluster/` makes one for each worker and gives it the handlers of its role. What prefill and decode workers share lives
here and nowhere else; what differs lives in their handlers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any, Protocol

import grpc.aio
import msgspec

from ridgeline.contracts.errors import AdapterRefused, EngineFailed, HandoffLost, InvalidTask
from ridgeline.contracts.handoff import KvHandoff, new_handoff_id
from ridgeline.contracts.rpc.address import join_host_port
from ridgeline.contracts.rpc.channel import add_port
from ridgeline.contracts.tasks import GenerateTask, TokenDelta
from ridgeline.contracts.vocabulary import ErrorKind, Health, Leg
from ridgeline.contracts.workers import (
    MIN_FITTED_STEPS,
    AbortRequest,
    Ack,
    AdapterLoaded,
    AttachRequest,
    DrainRequest,
    LoadAdapter,
    Offer,
    OfferRequest,
    PairAnswer,
    PairRequest,
    Role,
    StepModel,
    SubmitRequest,
    UnloadAdapter,
    WorkerDescription,
    WorkerStatus,
)
from ridgeline.engine.vllm_engine import VllmEngine
from ridgeline.kv_transfer.memory.shared import host_identity
from ridgeline.worker_runtime.client import (
    MAX_MESSAGE_BYTES,
    OPTIONS,
    SERVICE,
    Meant,
    OnUnclaimed,
    encode,
    stream_handler,
    unary_handler,
)

logger = logging.getLogger(__name__)
HEALTH_LOOK_S = 0.5
"""How often a worker checks whether its health has changed. It reports a change to its routers at once."""
LATE_S = 1.0
"""If a look comes so much later than it was due, this process stood still."""
ABORT_WITHIN_S = 2.0
"""How long a task that is cut off may take to end; with a hung engine it may never end."""
MAX_DELTA_BYTES = MAX_MESSAGE_BYTES // 2
"""Largest delta: more than any answer needs whose log-probabilities the router has admitted."""
MAX_BATCH_BYTES = 4 << 20
"""Largest message of several deltas; a longer delta is sent alone."""
MAX_OUTBOX_BYTES = 128 << 20
"""How much may wait for a router that does not read. A minute of 1,000 streams of 30 tokens/s is a tenth of that."""
MAX_ERROR_CHARACTERS = 2000
UNNEEDED_POLL_S = 0.1
SETTLED_S = 1.0
"""How long a worker must report that nothing is held: what a request leaves behind is published one step after its end.
"""
LEASE_MARGIN_S = 2.0


class Handler(Protocol):
    """The way to run one leg of a request on an engine."""

    def run(self, engine: VllmEngine, task: GenerateTask) -> AsyncGenerator[TokenDelta, None]:
        """Yield the task's deltas, exactly one of them finished; closing the generator aborts the engine's request."""
        ...


class Undeliverable(Exception):
    """The delta is not sent, and the router has been told why; the task ends."""


class EncodedBatch(msgspec.Struct, frozen=True):
    """A `StepBatch` whose deltas are encoded already; it has the same bytes."""

    deltas: list[msgspec.Raw]


class RouterSession:
    """One attached router's running tasks, and the deltas not yet sent to it, up to a limit.

    Deltas are encoded one by one, so that how long a message gets is known before it is made: one that is longer than
    gRPC takes would end the stream of everybody.
    """

    def __init__(self, on_unread: OnUnclaimed) -> None:
        """Give `on_unread` the hand-offs of deltas that this router will never read."""
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._on_unread = on_unread
        self._closed = False
        self._outbox: deque[tuple[bytes, KvHandoff | None]] = deque()
        self.outbox_bytes = 0
        """What the router has not read yet."""
        self._filled = asyncio.Event()

    def send(self, delta: TokenDelta) -> None:
        """Put a delta into the next batch. Raises Undeliverable if it is too long, or too much waits already."""
        data = encode(delta)
        if len(data) > MAX_DELTA_BYTES:
            why = f"one step of it takes {len(data)} bytes, the limit is {MAX_DELTA_BYTES}: ask for fewer logprobs"
            self.fail(delta.request_id, why, "invalid", delta.handoff)
            raise Undeliverable
        if self.outbox_bytes + len(data) > MAX_OUTBOX_BYTES:
            why = f"the router has not read the last {self.outbox_bytes} bytes of this worker's answers"
            self.fail(delta.request_id, why, "engine", delta.handoff)
            raise Undeliverable
        self._put(data, delta.handoff)

    def fail(self, request_id: str, why: str, kind: ErrorKind, handoff: KvHandoff | None = None) -> None:
        """Put a task's last delta, an error, into the next batch. It always fits: there is one for each task."""
        delta = TokenDelta(
            request_id=request_id,
            finished=True,
            error=why[:MAX_ERROR_CHARACTERS],
            error_kind=kind,
            handoff=handoff,
        )
        self._put(encode(delta), handoff)

    def nudge(self) -> None:
        """Send the next batch even if it is empty: the router then asks at once how this worker is."""
        self._filled.set()

    def _put(self, data: bytes, handoff: KvHandoff | None) -> None:
        self._outbox.append((data, handoff))
        self.outbox_bytes += len(data)
        self._filled.set()
        if self._closed:
            self._drop_unread()

    def close(self) -> None:
        """Abort the tasks of a router that is gone, drop what it has not read, and end its stream."""
        self._closed = True
        self.abort(list(self.tasks))
        self._drop_unread()
        self._filled.set()

    def _drop_unread(self) -> None:
        unread, self._outbox, self.outbox_bytes = self._outbox, deque(), 0
        for _, handoff in unread:
            if handoff is not None:
                self._on_unread(handoff)

    async def next_batch(self) -> EncodedBatch | None:
        """Collect all deltas of one engine step; None once the session is closed.

        The step wakes every request in one turn of the loop, so wait two turns. Deltas beyond the size of a message are
        left for the next one.
        """
        await self._filled.wait()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if self._closed:
            return None
        deltas: list[msgspec.Raw] = []
        length_bytes = 0
        while self._outbox and (not deltas or length_bytes + len(self._outbox[0][0]) <= MAX_BATCH_BYTES):
            data, _ = self._outbox.popleft()
            length_bytes += len(data)
            deltas.append(msgspec.Raw(data))
        self.outbox_bytes -= length_bytes
        if not self._outbox:
            self._filled.clear()
        return EncodedBatch(deltas)

    def abort(self, request_ids: list[str]) -> None:
        """Cancel tasks; unknown ids have ended already."""
        for request_id in request_ids:
            task = self.tasks.get(request_id)
            if task is not None:
                task.cancel()


class WorkerHost:
    """A worker: one engine, a handler for each leg that it runs, one gRPC server."""

    def __init__(self, engine: VllmEngine, handlers: Mapping[Leg, Handler]) -> None:
        """A leg without a handler is refused."""
        self._engine = engine
        self._handlers = handlers
        self._sessions: dict[str, RouterSession] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """All that have not ended, those of sessions that are gone included."""
        self._server = grpc.aio.server(options=OPTIONS)
        self._leaving: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._looked_s = 0.0
        """When it was looked what the engine does, by the loop's clock."""
        self._cut_off_s = math.inf
        """When what still runs in a drain is cut off, by the loop's clock."""
        self._patience: asyncio.Timeout | None = None
        self.address = ""
        self._description: WorkerDescription | None = None
        self._told_role: Role | None = None
        self._role: Role | None = None
        """The role whose limits the engine has."""
        self._taking: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Serve on the engine's interface; returns host:port."""
        config = self._engine.config
        layout, transfer_addresses = await self._engine.describe()
        max_loras, max_cpu_loras = self._engine.adapter_room
        self._description = WorkerDescription(
            worker_id=config.worker_id,
            incarnation=config.incarnation,
            pool=config.pool,
            pid=os.getpid(),
            host=config.transfer.host,
            layout=layout,
            transfer_addresses=transfer_addresses,
            num_kv_blocks=self._engine.num_kv_blocks,
            prefix_block_tokens=self._engine.prefix_block_tokens,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            repeats_tokens=config.repeats_tokens,
            node=host_identity(),
            rack=config.rack,
            device=config.device,
            max_loras=max_loras,
            max_cpu_loras=max_cpu_loras,
        )
        this = Meant(config.worker_id, config.incarnation)
        unary: dict[str, tuple[Callable[[Any], Any], type[Any]]] = {
            "Describe": (self._describe, Ack),
            "Status": (self._status, Ack),
            "ResetPrefixCache": (self._reset_prefix_cache, Ack),
            "Pair": (self._pair, PairRequest),
            "Offer": (self._offer, OfferRequest),
            "Submit": (self._submit, SubmitRequest),
            "Abort": (self._abort, AbortRequest),
            "Drain": (self._drain, DrainRequest),
            "TakeRole": (self._take_role, Role),
            "LoadAdapter": (self._load_adapter, LoadAdapter),
            "UnloadAdapter": (self._unload_adapter, UnloadAdapter),
        }
        handlers = {name: unary_handler(*method, this) for name, method in unary.items()}
        handlers["Attach"] = stream_handler(self._attach, AttachRequest, this)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port = add_port(self._server, join_host_port(config.transfer.host, 0), config.transfer.tls)
        await self._server.start()
        self.address = join_host_port(config.transfer.host, port)
        self._looked_s = asyncio.get_running_loop().time()
        self._looking = asyncio.create_task(self._report_health(), name="report-health")
        return self.address

    def failure(self) -> Health:
        """Report whether this worker must be replaced, and why; one that drains is leaving, and is not replaced."""
        if self._leaving is not None:
            return "drained" if self._leaving.done() or self._engine.failed else "draining"
        if self._engine.failed:
            return "engine_died"
        self._notice_own_rest()
        stalled = self._engine.stats.stall.is_stalled(self._engine.config.stall_timeout_s, has_work=bool(self._tasks))
        return "stalled" if stalled else ""

    @property
    def ending(self) -> str:
        """How the engine's process ended; empty if it runs."""
        return self._engine.ending

    async def _report_health(self) -> None:
        """Report each change of health to the routers, until cancelled: they seldom ask a worker that is idle."""
        reported = self.failure()
        while True:
            await asyncio.sleep(HEALTH_LOOK_S)
            self._look_at_engine()
            if (health := self.failure()) != reported:
                reported = health
                self._log(logging.INFO, f"is {health or 'well'}")
                for session in self._sessions.values():
                    session.nudge()

    def _notice_own_rest(self) -> None:
        """If this process stood still, perhaps with the whole machine, that says nothing of the engine."""
        now_s = asyncio.get_running_loop().time()
        rest_s = now_s - self._looked_s - HEALTH_LOOK_S
        if rest_s > LATE_S:
            self._engine.stats.stall.stood_still(rest_s)
            self._looked_s = now_s

    def _look_at_engine(self) -> None:
        """Look what the engine does, if a step is overdue."""
        self._notice_own_rest()
        now_s = asyncio.get_running_loop().time()
        overdue = bool(self._tasks) and self._stalled_s() >= HEALTH_LOOK_S
        doing = self._engine.doing() if overdue else "waits"
        self._engine.stats.stall.looked(now_s - self._looked_s, doing)
        self._looked_s = now_s

    def drain(self, timeout_s: float | None = None) -> asyncio.Task[None]:
        """Take no new task; what has not ended after `timeout_s` is cut off. Ends once nobody needs the KV here.

        If `timeout_s` is None, the configuration decides. A later call can shorten a drain that has begun, and changes
        nothing else.
        """
        patience_s = self._engine.config.drain_timeout_s if timeout_s is None else timeout_s
        self._cut_off_s = min(self._cut_off_s, asyncio.get_running_loop().time() + patience_s)
        if self._leaving is None:
            self._log(logging.INFO, "drains", tasks=len(self._tasks), timeout_s=patience_s)
            self._leaving = asyncio.create_task(self._leave(), name="drain")
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(self._cut_off_s)
        return self._leaving

    async def _leave(self) -> None:
        running = [(session, name, task) for session in self._sessions.values() for name, task in session.tasks.items()]
        if running:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._cut_off_s) as self._patience:
                    await asyncio.wait([task for _, _, task in running])
            self._patience = None
            late = [task for _, _, task in running if not task.done()]
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=ABORT_WITHIN_S)
        for session, name, task in running:
            if not task.done() or task.cancelled():  # else it has sent its finished delta itself
                session.fail(name, self._refusal, "draining")
        await kv_unneeded(self._engine.stats, self._engine.config.transfer.lease_s)

    async def close_peer_mappings(self) -> None:
        """Close the KV caches of other workers that are open here, before these are freed."""
        await self._engine.close_peer_mappings()

    async def stop(self) -> None:
        """Abort what runs, close the server, end the engine process."""
        for task in (self._leaving, self._looking, self._taking):
            if task is not None:
                task.cancel()
        for session in self._sessions.values():
            session.abort(list(session.tasks))
        await self._server.stop(grace=0.5)
        self._engine.close()

    def _log(self, level: int, change: str, **facts: object) -> None:
        logger.log(level, change, extra={"worker": self._engine.config.worker_id, **facts})

    @property
    def _refusal(self) -> str:
        return f"{self._engine.config.worker_id} is draining"

    def _release_own(self, handoff: KvHandoff) -> None:
        self._engine.release_own(handoff.handoff_id)

    def _stalled_s(self) -> float:
        return self._engine.stats.stall.stalled_s(has_work=bool(self._tasks))

    # --- methods of the data plane

    async def _describe(self, request: Ack) -> WorkerDescription:
        assert self._description is not None
        return msgspec.structs.replace(self._description, role=self._told_role, adapters=self._engine.offered_adapters)

    async def _status(self, request: Ack) -> WorkerStatus:
        stats = self._engine.stats
        total = self._engine.num_kv_blocks
        return WorkerStatus(
            worker_id=self._engine.config.worker_id,
            running=stats.running,
            waiting=stats.waiting,
            tasks=len(self._tasks),
            kv_blocks_free=round(total * (1.0 - stats.kv_usage)),
            kv_blocks_total=total,
            counters=stats.counters,
            stale_handoffs=stats.stale_handoffs,
            draining=self._leaving is not None,
            engine_failed=self._engine.failed,
            # Report 0 while idle. A router sends nothing to a stalled worker, so a worker that hung and then lost its
            # last task would never get the work that either unblocks it or lets it reach the stall timeout.
            stalled_s=self._stalled_s() if self._tasks else 0.0,
            incarnation=self._engine.config.incarnation,
            role_number=self._role.number if self._role else 0,
            step_model=_known(stats.step_model),
        )

    async def _pair(self, request: PairRequest) -> PairAnswer:
        answers = await self._engine.pair(request.addresses, request.transport)
        refused = {address: answer for address, answer in answers.items() if isinstance(answer, str)}
        paired = {
            address: (answer.transport, answer.why)
            for address, answer in answers.items()
            if not isinstance(answer, str)
        }
        return PairAnswer(paired=paired, refused=refused)

    async def _offer(self, request: OfferRequest) -> Offer:
        """Offer what the cache has; a worker that leaves offers nothing, since it waits until nobody needs its KV."""
        task, handoff_id = request.task, new_handoff_id()
        tokens = task.prompt_token_ids + task.emitted_token_ids
        if self._leaving is not None or not tokens:
            return Offer()
        try:
            found = await self._engine.offer(handoff_id, tokens, task.cache_salt, task.adapter)
            return Offer(found and msgspec.structs.replace(found, adapter=task.adapter_key))
        except (EngineFailed, InvalidTask):  # or the adapter has been unloaded
            return Offer()
        except asyncio.CancelledError:  # the router is gone; the engine may offer it all the same
            self._engine.release_own(handoff_id)
            raise

    async def _take_role(self, role: Role) -> Ack:
        """Note the role, and tell the engine its limits beside the call: that has to wait for the running step."""
        self._told_role = role
        if self._taking is None:
            self._taking = asyncio.create_task(self._take_roles(), name="take-role")
        return Ack()

    async def _take_roles(self) -> None:
        try:
            while self._told_role is not None and self._told_role != self._role:
                role = self._told_role
                await self._engine.limit_steps(role.max_num_seqs, role.max_num_batched_tokens, role.step_target_s)
                self._role = role
                self._log(logging.INFO, "has its role", pool=role.pool, number=role.number)
        except EngineFailed as error:
            logger.warning("no limits for the role %s: %s", self._told_role, error)  # the worker will be replaced
        finally:
            self._taking = None

    async def _load_adapter(self, asked: LoadAdapter) -> AdapterLoaded:
        try:
            adapter = await self._engine.load_adapter(asked.name, asked.path, asked.digest)
        except (AdapterRefused, EngineFailed) as error:
            return AdapterLoaded(refused=f"{self._engine.config.worker_id}: {error}")
        self._log(logging.INFO, "has an adapter", adapter=adapter.key)
        return AdapterLoaded(adapter=adapter)

    async def _unload_adapter(self, asked: UnloadAdapter) -> Ack:
        self._engine.unload_adapter(asked.adapter, asked.after_s)
        return Ack()

    async def _reset_prefix_cache(self, request: Ack) -> Ack:
        return Ack(accepted=await self._engine.reset_prefix_cache())

    async def _submit(self, request: SubmitRequest) -> Ack:
        session = self._sessions.get(request.router_id)
        if session is None:
            return Ack(accepted=False, reason="attach a stream first", attached=False)
        if self._leaving is not None:
            return Ack(accepted=False, reason=self._refusal)
        request_id = request.task.request_id
        if request_id in session.tasks:
            return Ack(accepted=False, reason=f"request {request_id} is running already")
        self._start(session, request.task)
        return Ack()

    def _start(self, session: RouterSession, wanted: GenerateTask) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self._log(logging.DEBUG, "task ended", request=wanted.request_id)
            session.tasks.pop(wanted.request_id, None)
            self._tasks.discard(task)
            if not self._tasks:
                self._engine.stats.stall.work_ends()

        self._log(logging.DEBUG, "task begins", request=wanted.request_id, leg=wanted.leg)
        if not self._tasks:
            self._engine.stats.stall.work_begins()
        task = asyncio.create_task(self._run(session, wanted), name=wanted.request_id)
        session.tasks[wanted.request_id] = task
        self._tasks.add(task)
        task.add_done_callback(ended)

    async def _drain(self, request: DrainRequest) -> Ack:
        self.drain(request.timeout_s)
        return Ack()

    async def _abort(self, request: AbortRequest) -> Ack:
        session = self._sessions.get(request.router_id)
        if session is not None:
            session.abort(request.request_ids)
        return Ack()

    async def _attach(self, request: AttachRequest) -> AsyncIterator[EncodedBatch]:
        previous = self._sessions.get(request.router_id)
        if previous is not None:
            previous.close()  # it came back before we noticed that it was gone
        session = self._sessions[request.router_id] = RouterSession(self._release_own)
        try:
            yield EncodedBatch([])  # tells the router that the session is open
            # It ends if this router attaches again: requests cross on several connections, and the last one to arrive
            # may be one that it has given up. Whoever still reads here must learn that its tasks were aborted.
            while (batch := await session.next_batch()) is not None:
                yield batch
        finally:
            # The router is gone or has reattached: nobody reads these tokens any more.
            session.close()
            if self._sessions.get(request.router_id) is session:
                del self._sessions[request.router_id]

    def _handler_of(self, leg: Leg) -> Handler:
        handler = self._handlers.get(leg)
        if handler is None:
            raise InvalidTask(f"this worker has no handler for a {leg} leg")
        return handler

    async def _run(self, session: RouterSession, task: GenerateTask) -> None:
        """Run one task, from its first step to its one finished delta. The only place where its errors are caught."""
        try:
            if not task.prompt_token_ids:
                raise InvalidTask("the task has no prompt")
            async with aclosing(self._handler_of(task.leg).run(self._engine, task)) as deltas:
                async for delta in deltas:
                    session.send(delta)
        except Undeliverable:
            self._log(logging.WARNING, "a delta was too long, or the router did not read", request=task.request_id)
        except InvalidTask as error:
            session.fail(task.request_id, str(error), "invalid")
        except HandoffLost as error:
            session.fail(task.request_id, error.reason, "handoff")
        except EngineFailed as error:
            session.fail(task.request_id, str(error), "engine")
        except Exception as error:
            logger.exception("task failed", extra={"request": task.request_id, "worker": self._engine.config.worker_id})
            session.fail(task.request_id, f"{type(error).__name__}: {error}", "engine")


def _known(model: StepModel | None) -> StepModel | None:
    return model if model is not None and model.steps >= MIN_FITTED_STEPS else None


class CounterSource(Protocol):
    """Where the engine's newest statistics are."""

    @property
    def counters(self) -> dict[str, float]: ...


async def kv_unneeded(stats: CounterSource, lease_s: float) -> None:
    """Wait until no hand-off is open and no block is pinned, at most for the time of a lease."""
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + max(lease_s, SETTLED_S) + LEASE_MARGIN_S
    free_since_s = loop.time()
    while loop.time() < give_up_s:
        if stats.counters.get("open_leases", 0.0) or stats.counters.get("pinned_blocks", 0.0):
            free_since_s = loop.time()
        elif loop.time() - free_since_s >= SETTLED_S:
            return
        await asyncio.sleep(UNNEEDED_POLL_S)
