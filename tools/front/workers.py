"""Workers without engines: they answer the router's calls over real gRPC and make tokens at a fixed pace.

One process holds all of them. A decode worker sends one token for each of its sequences at every step, in one message
for each router, as a real one does; a prefill worker answers at once. A token costs this process about 1 us, so that
what a bench measures is the router.

usage: python -m tools.front.workers PREFILL_WORKERS DECODE_WORKERS STEP_S OUTPUT_TOKENS
Prints the addresses in one line, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc.aio

from ridgeline.contracts.handoff import KvHandoff
from ridgeline.contracts.rpc.address import join_host_port
from ridgeline.contracts.rpc.channel import add_port
from ridgeline.contracts.tasks import LegTiming, StepBatch, TokenDelta
from ridgeline.contracts.vocabulary import Pool
from ridgeline.contracts.workers import (
    AbortRequest,
    Ack,
    AttachRequest,
    PairAnswer,
    PairRequest,
    Role,
    SubmitRequest,
    WorkerDescription,
    WorkerStatus,
)
from ridgeline.worker_runtime.client import OPTIONS, SERVICE, stream_handler, unary_handler
from tests.support.samples import kv_layout, worker_description

HOST = "127.0.0.1"
BLOCK_TOKENS = 32
NUM_KV_BLOCKS = 1_000_000
MAX_NUM_SEQS = 1024
TIMING = LegTiming(queue_s=0.0, first_token_s=0.001, compute_s=0.001)
FIRST_TOKEN_ID, TOKEN_IDS = 1000, 20_000
"""Ids of the tokens sent, in turn: ordinary words of a vocabulary."""
LAYOUT = kv_layout(block_size_tokens=BLOCK_TOKENS, num_layers=1, num_kv_heads=1)


@dataclass
class Session:
    """One router's stream: what runs for it, by request id with the tokens still to come, and what was not sent yet."""

    left: dict[str, int] = field(default_factory=dict)
    unsent: deque[StepBatch] = field(default_factory=deque)
    filled: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, deltas: list[TokenDelta]) -> None:
        """Put one message into the stream."""
        self.unsent.append(StepBatch(deltas))
        self.filled.set()


class PacedWorker:
    """A worker of one pool."""

    def __init__(self, pool: Pool, number: int, step_s: float, output_tokens: int) -> None:
        self._pool = pool
        self._name = f"{pool}-{number}"
        self._step_s = step_s
        self._output_tokens = output_tokens
        self._sessions: dict[str, Session] = {}
        self._server = grpc.aio.server(options=OPTIONS)
        self._sent_tokens = 0

    async def start(self) -> str:
        """Serve; returns host:port."""
        handlers = {
            "Describe": unary_handler(self._describe, Ack),
            "Status": unary_handler(self._status, Ack),
            "Pair": unary_handler(self._pair, PairRequest),
            "TakeRole": unary_handler(self._take_role, Role),
            "Submit": unary_handler(self._submit, SubmitRequest),
            "Abort": unary_handler(self._abort, AbortRequest),
            "Attach": stream_handler(self._attach, AttachRequest),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port = add_port(self._server, join_host_port(HOST, 0), None)
        await self._server.start()
        return join_host_port(HOST, port)

    async def pace(self) -> None:
        """Make a step every `step_s`, late ones included, until cancelled; workers step at different moments."""
        clock = asyncio.get_running_loop().time
        due_s = clock() + random.random() * self._step_s
        while True:
            due_s += self._step_s
            await asyncio.sleep(due_s - clock())
            for session in self._sessions.values():
                if session.left:
                    session.send([self._next(session, request_id) for request_id in tuple(session.left)])

    def _next(self, session: Session, request_id: str) -> TokenDelta:
        self._sent_tokens += 1
        left = session.left[request_id] - 1
        token_ids = [FIRST_TOKEN_ID + self._sent_tokens % TOKEN_IDS]
        if left:
            session.left[request_id] = left
            return TokenDelta(request_id=request_id, token_ids=token_ids)
        del session.left[request_id]
        return TokenDelta(
            request_id=request_id, token_ids=token_ids, finished=True, finish_reason="length", timing=TIMING
        )

    async def _submit(self, request: SubmitRequest) -> Ack:
        session, task = self._sessions.get(request.router_id), request.task
        if session is None:
            return Ack(accepted=False, reason="attach a stream first", attached=False)
        if task.leg == "decode":
            session.left[task.request_id] = self._output_tokens - len(task.emitted_token_ids)
            return Ack()
        blocks = -(-len(task.prompt_token_ids) // BLOCK_TOKENS)
        handoff = KvHandoff(
            handoff_id=task.request_id,
            addresses=(f"{HOST}:1",),
            num_blocks=blocks,
            num_tokens=len(task.prompt_token_ids),
            compatibility_hash=LAYOUT.compatibility_hash(),
            lease_s=60.0,
            num_bytes=blocks * LAYOUT.block_bytes,
        )
        first = TokenDelta(
            request_id=task.request_id, token_ids=[FIRST_TOKEN_ID], finished=True, handoff=handoff, timing=TIMING
        )
        session.send([first])
        return Ack()

    async def _abort(self, request: AbortRequest) -> Ack:
        session = self._sessions.get(request.router_id, Session())
        for request_id in request.request_ids:
            session.left.pop(request_id, None)
        return Ack()

    async def _attach(self, request: AttachRequest) -> AsyncIterator[StepBatch]:
        session = self._sessions[request.router_id] = Session()
        try:
            yield StepBatch([])
            while True:
                await session.filled.wait()
                while session.unsent:
                    yield session.unsent.popleft()
                session.filled.clear()
        finally:
            if self._sessions.get(request.router_id) is session:
                del self._sessions[request.router_id]

    async def _describe(self, _: Ack) -> WorkerDescription:
        return worker_description(
            worker_id=self._name,
            incarnation="1",
            pool=self._pool,
            host=HOST,
            layout=LAYOUT,
            transfer_addresses=[f"{HOST}:1"],
            num_kv_blocks=NUM_KV_BLOCKS,
            block_size_tokens=BLOCK_TOKENS,
            max_model_len_tokens=8192,
            max_num_seqs=MAX_NUM_SEQS,
        )

    async def _status(self, _: Ack) -> WorkerStatus:
        running = sum(len(session.left) for session in self._sessions.values())
        return WorkerStatus(
            worker_id=self._name,
            running=running,
            tasks=running,
            kv_blocks_free=NUM_KV_BLOCKS,
            kv_blocks_total=NUM_KV_BLOCKS,
            incarnation="1",
        )

    async def _pair(self, request: PairRequest) -> PairAnswer:
        return PairAnswer(paired=dict.fromkeys(request.addresses, ("shm", "")), refused={})

    async def _take_role(self, _: Role) -> Ack:
        return Ack()


async def main(prefills: int, decodes: int, step_s: float, output_tokens: int) -> None:
    """Serve until the standard input is closed."""
    workers = [PacedWorker("prefill", number, step_s, output_tokens) for number in range(prefills)]
    workers += [PacedWorker("decode", number, step_s, output_tokens) for number in range(decodes)]
    addresses = [await worker.start() for worker in workers]
    pacing = [asyncio.create_task(worker.pace()) for worker in workers]
    sys.stdout.write(" ".join(addresses) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    for task in pacing:
        task.cancel()


if __name__ == "__main__":
    prefill_workers, decode_workers, step, tokens = sys.argv[1:]
    asyncio.run(main(int(prefill_workers), int(decode_workers), float(step), int(tokens)))
