"""The host every worker is built on: life cycle, sessions with routers, cancel, drain, status.

`cluster/` makes one per Ray actor and gives it the handler of its role. What prefill and decode workers share lives
here and nowhere else; what differs lives in their handlers.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Protocol

import grpc.aio

from engine.data_plane import OPTIONS, SERVICE, stream_handler, unary_handler
from engine.errors import EngineFailed, HandoffLost, InvalidTask
from engine.messages import (
    AbortRequest,
    Ack,
    AttachRequest,
    GenerateTask,
    PairAnswer,
    PairRequest,
    StepBatch,
    SubmitRequest,
    TokenDelta,
    WorkerDescription,
    WorkerStatus,
)
from engine.vllm_engine import VllmEngine

logger = logging.getLogger(__name__)


class Handler(Protocol):
    """One role's way to run a task on an engine."""

    def run(self, engine: VllmEngine, task: GenerateTask) -> AsyncGenerator[TokenDelta, None]:
        """Yield the task's deltas, exactly one of them finished; closing the generator aborts the engine's request."""
        ...


class RouterSession:
    """What one attached router waits for: its running tasks and the deltas not yet sent."""

    def __init__(self) -> None:
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._outbox: list[TokenDelta] = []
        self._filled = asyncio.Event()

    def send(self, delta: TokenDelta) -> None:
        """Put a delta into the next batch."""
        self._outbox.append(delta)
        self._filled.set()

    async def next_batch(self) -> StepBatch:
        """All deltas of one engine step: the step wakes every request in one turn of the loop, so wait two turns."""
        await self._filled.wait()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self._filled.clear()
        batch, self._outbox = StepBatch(self._outbox), []
        return batch

    def abort(self, request_ids: list[str]) -> None:
        """Cancel tasks; unknown ids have ended already."""
        for request_id in request_ids:
            task = self.tasks.get(request_id)
            if task is not None:
                task.cancel()


class WorkerHost:
    """One engine, one handler, one gRPC server."""

    def __init__(self, engine: VllmEngine, handler: Handler) -> None:
        self._engine = engine
        self._handler = handler
        self._sessions: dict[str, RouterSession] = {}
        self._server = grpc.aio.server(options=OPTIONS)
        self._draining = False
        self.address = ""
        self._description: WorkerDescription | None = None

    async def start(self) -> str:
        """Serve on the engine's interface; returns host:port."""
        config = self._engine.config
        layout, transfer_addresses = await self._engine.describe()
        self._description = WorkerDescription(
            worker_id=config.worker_id,
            incarnation=config.incarnation,
            pool=config.pool,
            pid=os.getpid(),
            host=config.host,
            layout=layout,
            transfer_addresses=transfer_addresses,
            num_kv_blocks=self._engine.num_kv_blocks,
            block_size_tokens=config.block_size_tokens,
            max_model_len_tokens=config.max_model_len_tokens,
        )
        handlers = {
            "Describe": unary_handler(self._describe, Ack),
            "Status": unary_handler(self._status, Ack),
            "ResetPrefixCache": unary_handler(self._reset_prefix_cache, Ack),
            "Pair": unary_handler(self._pair, PairRequest),
            "Submit": unary_handler(self._submit, SubmitRequest),
            "Abort": unary_handler(self._abort, AbortRequest),
            "Attach": stream_handler(self._attach, AttachRequest),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port = self._server.add_insecure_port(f"{config.host}:0")
        await self._server.start()
        self.address = f"{config.host}:{port}"
        return self.address

    @property
    def engine_failed(self) -> bool:
        """True once the engine process is gone."""
        return self._engine.failed

    async def drain(self, timeout_s: float) -> bool:
        """Take no new tasks; True when the running ones ended within `timeout_s`."""
        self._draining = True
        running = [task for session in self._sessions.values() for task in session.tasks.values()]
        if not running:
            return True
        _, pending = await asyncio.wait(running, timeout=timeout_s)
        return not pending

    async def stop(self) -> None:
        """Abort what runs, close the server, end the engine process."""
        for session in self._sessions.values():
            session.abort(list(session.tasks))
        await self._server.stop(grace=0.5)
        self._engine.close()

    # --- methods of the data plane

    async def _describe(self, request: Ack) -> WorkerDescription:
        assert self._description is not None
        return self._description

    async def _status(self, request: Ack) -> WorkerStatus:
        stats = self._engine.stats
        total = self._engine.num_kv_blocks
        return WorkerStatus(
            worker_id=self._engine.config.worker_id,
            running=stats.running,
            waiting=stats.waiting,
            tasks=sum(len(session.tasks) for session in self._sessions.values()),
            kv_blocks_free=round(total * (1.0 - stats.kv_usage)),
            kv_blocks_total=total,
            counters=stats.counters,
            draining=self._draining,
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

    async def _reset_prefix_cache(self, request: Ack) -> Ack:
        return Ack(accepted=await self._engine.reset_prefix_cache())

    async def _submit(self, request: SubmitRequest) -> Ack:
        session = self._sessions.get(request.router_id)
        if session is None:
            return Ack(accepted=False, reason="attach a stream first")
        if self._draining:
            return Ack(accepted=False, reason=f"worker {self._engine.config.worker_id} is draining")
        request_id = request.task.request_id
        if request_id in session.tasks:
            return Ack(accepted=False, reason=f"request {request_id} is running already")
        task = asyncio.create_task(self._run(session, request.task), name=request_id)
        session.tasks[request_id] = task
        task.add_done_callback(lambda _: session.tasks.pop(request_id, None))
        return Ack()

    async def _abort(self, request: AbortRequest) -> Ack:
        session = self._sessions.get(request.router_id)
        if session is not None:
            session.abort(request.request_ids)
        return Ack()

    async def _attach(self, request: AttachRequest) -> AsyncIterator[StepBatch]:
        previous = self._sessions.get(request.router_id)
        if previous is not None:
            # It came back before we noticed that it was gone.
            previous.abort(list(previous.tasks))
        session = self._sessions[request.router_id] = RouterSession()
        try:
            yield StepBatch([])  # tells the router that the session is open
            while True:
                yield await session.next_batch()
        finally:
            # The router is gone or has reattached: nobody reads these tokens any more.
            session.abort(list(session.tasks))
            if self._sessions.get(request.router_id) is session:
                del self._sessions[request.router_id]

    async def _run(self, session: RouterSession, task: GenerateTask) -> None:
        """One task, from its first step to its one finished delta. The only place where its errors are caught."""
        try:
            if not task.prompt_token_ids:
                raise InvalidTask("the task has no prompt")
            async with aclosing(self._handler.run(self._engine, task)) as deltas:
                async for delta in deltas:
                    session.send(delta)
        except InvalidTask as error:
            session.send(TokenDelta(request_id=task.request_id, finished=True, error=str(error), error_kind="invalid"))
        except HandoffLost as error:
            session.send(
                TokenDelta(request_id=task.request_id, finished=True, error=error.reason, error_kind="handoff")
            )
        except EngineFailed as error:
            session.send(TokenDelta(request_id=task.request_id, finished=True, error=str(error), error_kind="engine"))
        except Exception as error:
            logger.exception("task %s failed", task.request_id)
            message = f"{type(error).__name__}: {error}"
            session.send(TokenDelta(request_id=task.request_id, finished=True, error=message, error_kind="engine"))
