"""The child process that `measure` fetches from: it owns a KV cache and serves it as an engine would.

It ends with its parent in any case: by command, when the pipe breaks, at its idle limit, or through a thread that waits
only for the parent's end.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from types import TracebackType
from typing import Any, Final

import torch

from ridgeline.contracts.handoff import KvHandoff, KvLayout, new_handoff_id
from ridgeline.kv_transfer.memory.shared import KvCacheAllocation
from ridgeline.kv_transfer.names import TransportName
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.kv_transfer.service import RankLayers, TransferService

BLOCK_TOKENS: Final = 32
LEASE_S: Final = 30.0
START_S: Final = 120.0
"""Time for a new Python process to import PyTorch and fill the cache."""
ANSWER_S: Final = 30.0
IDLE_S: Final = 300.0
"""A source that receives no command for this long exits."""
END_S: Final = 15.0
SOURCE_SEED: Final = 1
"""Of the noise in the child's cache."""


class MeasureError(Exception):
    """A measurement cannot begin or did not end; the message says why and what to change."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The shape of one side's KV cache."""

    num_layers: int
    num_blocks: int
    block_bytes: int
    """Bytes of one block in one layer."""
    device: str = "cpu"
    """Where it lies: torch's name of the device."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_layers * self.num_blocks * self.block_bytes

    def handoff_bytes(self, num_blocks: int) -> int:
        """Return the bytes of that many blocks over all layers."""
        return self.num_layers * num_blocks * self.block_bytes


class Cache:
    """A KV cache filled with noise, in shared memory if it is large enough. Several services can use it."""

    def __init__(self, shape: CacheShape, seed: int = 0) -> None:
        """`seed` is the noise's."""
        allocation = KvCacheAllocation()
        with allocation.serving_torch_zeros():
            buffer = torch.zeros(shape.num_bytes, dtype=torch.int8, device=shape.device)
        self.layers = buffer.view(torch.uint8).view(shape.num_layers, shape.num_blocks, shape.block_bytes)
        """The cache as uint8 [layers, blocks, bytes of a block]."""
        self.layers.random_(0, 255, generator=torch.Generator(shape.device).manual_seed(seed))
        if self.layers.is_cuda:
            torch.cuda.synchronize(self.layers.device)  # a pool waits for no kernel but its own
        self._shape = shape
        self._shared = allocation.offer(list(self.layers))

    def service(
        self, transport: TransportName, host: str = "127.0.0.1", fetch_deadline_s: float = 30.0
    ) -> TransferService:
        """Build a service as an engine does, on a free port; the caller starts it."""
        layout = KvLayout(
            model="measure",
            dtype="bfloat16",
            kv_dtype="auto",
            block_size_tokens=BLOCK_TOKENS,
            num_layers=self._shape.num_layers,
            num_kv_heads=1,
            block_bytes=self._shape.block_bytes,
            layout="LBHNC",
            isa="measure",
            engine_version="0",
            tensor_parallel_size=1,
        )
        layers = {f"layer{index}": layer for index, layer in enumerate(self.layers)}
        options = TransferOptions(host, transport=transport, lease_s=LEASE_S, fetch_deadline_s=fetch_deadline_s)
        return TransferService(RankLayers(layers, layout, self._shared), options)


def offer(service: TransferService, request_id: str, block_ids: Sequence[int], shape: CacheShape) -> KvHandoff:
    """Publish these blocks as a finished prefill does, and return the hand-off."""
    handoff = KvHandoff(
        handoff_id=new_handoff_id(),
        addresses=(service.address,),
        num_blocks=len(block_ids),
        num_tokens=len(block_ids) * BLOCK_TOKENS,
        compatibility_hash="",
        lease_s=LEASE_S,
        num_bytes=shape.handoff_bytes(len(block_ids)),
    )
    service.publish(request_id, handoff.handoff_id, block_ids, handoff.num_tokens)
    return handoff


def wait_freed(service: TransferService, request_id: str, timeout_s: float = ANSWER_S) -> bool:
    """Poll, as an engine's step loop does, until this request's blocks are free again; return False if they stay.

    Completions of other requests are dropped: use it with one hand-off at a time.
    """
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if request_id in service.poll().sent:
            return True
        service.wait(1.0)
    return False


@dataclass(frozen=True, slots=True)
class _Publish:
    transport: TransportName
    request_id: str
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _WaitFreed:
    transport: TransportName
    request_id: str


class SourceProcess:
    """The parent's handle. Every wait has a deadline; `close`, or leaving the `with` block, always ends the child."""

    def __init__(self, shape: CacheShape, transports: Sequence[TransportName], core: int | None) -> None:
        """Create one service for each transport, all over one cache; with `core`, run the child on that core only."""
        context = multiprocessing.get_context("spawn")
        self._pipe, self._childs_end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(self._childs_end, shape, tuple(transports), core), name="kv-source", daemon=True
        )
        self.addresses: dict[str, str] = {}
        """host:port by transport, filled by `start`."""

    @property
    def pid(self) -> int | None:
        """The child's process id; None before `start`."""
        return self._process.pid

    def start(self) -> None:
        """Start the child and return when it serves. Raises MeasureError if it does not come up."""
        self._process.start()
        self._childs_end.close()  # the child must hold the only copy, so that the pipe breaks when it dies
        self.addresses = self._answer(START_S)

    def publish(self, transport: TransportName, request_id: str, block_ids: Sequence[int]) -> tuple[KvHandoff, float]:
        """Publish these blocks; return the hand-off and the CPU seconds that the child has used so far.

        Raises MeasureError if the child does not answer.
        """
        params, cpu_s = self._ask(_Publish(transport, request_id, tuple(block_ids)))
        return KvHandoff.from_params(params), cpu_s

    def wait_freed(self, transport: TransportName, request_id: str) -> float:
        """Wait until the fetching side has released the blocks; return the CPU seconds the child has used so far.

        Raises MeasureError if they are not released in time.
        """
        freed, cpu_s = self._ask(_WaitFreed(transport, request_id))
        if not freed:
            raise MeasureError(f"{transport}: the blocks of {request_id} were not given back within {ANSWER_S:.0f} s")
        used_s: float = cpu_s
        return used_s

    def close(self) -> None:
        """End the child. Calling it again does nothing."""
        with suppress(OSError):
            self._pipe.send(None)
        self._pipe.close()
        if self._process.pid is not None:
            self._process.join(END_S)
            if self._process.is_alive():
                self._process.kill()
                self._process.join(END_S)

    def __enter__(self) -> SourceProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, command: _Publish | _WaitFreed) -> Any:
        try:
            self._pipe.send(command)
        except OSError as error:
            raise self._gone() from error
        return self._answer(ANSWER_S + 5.0)

    def _answer(self, timeout_s: float) -> Any:
        try:
            if self._pipe.poll(timeout_s):
                return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        raise MeasureError(f"the source process did not answer within {timeout_s:.0f} s: is this machine overloaded?")

    def _gone(self) -> MeasureError:
        self._process.join(END_S)
        return MeasureError(
            f"the source process ended (exit status {self._process.exitcode}): if no error stands above, "
            "free some memory or measure fewer tokens"
        )


def _serve(
    pipe: connection.Connection, shape: CacheShape, transports: tuple[TransportName, ...], core: int | None
) -> None:
    """Run the child until the parent ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent as well, which then ends us
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    if core is not None:
        os.sched_setaffinity(0, {core})
    cache = Cache(shape, SOURCE_SEED)
    services = {name: cache.service(name) for name in transports}
    try:
        for service in services.values():
            service.start()
        pipe.send({name: service.address for name, service in services.items()})
        while pipe.poll(IDLE_S) and (command := pipe.recv()) is not None:
            pipe.send(_obey(services, shape, command))
    except (EOFError, OSError):
        return  # the parent is gone or has given up
    finally:
        for service in services.values():
            service.close()


def _obey(
    services: dict[TransportName, TransferService], shape: CacheShape, command: _Publish | _WaitFreed
) -> tuple[Any, float]:
    """Execute the command; return its result and this process's CPU seconds."""
    service = services[command.transport]
    if isinstance(command, _Publish):
        return offer(service, command.request_id, command.block_ids, shape).to_params(), time.process_time()
    return wait_freed(service, command.request_id), time.process_time()


def _end_with_parent() -> None:
    """Exit when the parent does, even if it was killed and whatever else this process is waiting for."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
