"""How fast one hand-off moves between two processes on this host, by transport, with memcpy as the baseline.

A child process owns the source and this one the target, both through `TransferService`, as in production. Transports
alternate hand-off by hand-off, so that a disturbance of the machine affects all of them alike. The blocks of a hand-off
are scattered, as they are in a cache that has been used. memcpy is the baseline because no transfer can be faster than
one copy of its bytes. The caches are in host memory. `ridgeline bench transfer` prints the result.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from types import TracebackType
from typing import Any, Final

import numpy as np
import torch

from ridgeline.contracts.handoff import KvHandoff, KvLayout, new_handoff_id
from ridgeline.kv_transfer.memory.shared import SMALLEST_BYTES, KvCacheAllocation
from ridgeline.kv_transfer.names import TRANSPORT_NAMES, TransportName
from ridgeline.kv_transfer.nixl.library import why_missing as nixl_missing
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.kv_transfer.service import RankLayers, TransferService
from ridgeline.roofline.process_cores import usable_cores

MEASURABLE: Final = tuple(name for name in TRANSPORT_NAMES if name not in ("auto", "cuda-ipc"))
"""The transports between caches in host memory with figures of their own: `auto` picks one of the others."""
BLOCK_TOKENS: Final = 32
LEAST_ROUNDS: Final = 3
CACHE_PER_HANDOFF: Final = 2
"""Blocks in each side's cache for each block moved, so that there is room to scatter them."""
COPIES_IN_MEMORY: Final = 2 * CACHE_PER_HANDOFF + 2
"""Copies of a hand-off's bytes held at once: two caches, and the source and target of memcpy."""
LEASE_S: Final = 30.0
FETCH_DEADLINE_S: Final = 30.0
START_S: Final = 120.0
"""Time for a new Python process to import PyTorch and fill the cache."""
ANSWER_S: Final = 30.0
END_S: Final = 15.0
SOURCE_SEED: Final = 1
"""Of the noise in the child's cache."""


class MeasureError(Exception):
    """A measurement cannot begin or did not end; the message says why and what to change."""


def measurable_here() -> tuple[str, ...]:
    """Return those of the measurable transports whose packages are installed."""
    return tuple(name for name in MEASURABLE if name != "nixl" or nixl_missing() is None)


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
        return self.handoff_bytes(self.num_blocks)

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
        self,
        transport: TransportName,
        host: str = "127.0.0.1",
        kv_fetch_timeout_s: float = FETCH_DEADLINE_S,
        lease_s: float = LEASE_S,
    ) -> TransferService:
        """Build a service as an engine does, on a free port; the caller starts it."""
        layout = KvLayout(
            model="measure",
            dtype="bfloat16",
            kv_dtype="auto",
            block_size=BLOCK_TOKENS,
            num_layers=self._shape.num_layers,
            num_kv_heads=1,
            block_bytes=self._shape.block_bytes,
            layout="LBHNC",
            isa="measure",
            engine_version="0",
            tensor_parallel_size=1,
        )
        layers = {f"layer{index}": layer for index, layer in enumerate(self.layers)}
        options = TransferOptions(host, transport=transport, lease_s=lease_s, kv_fetch_timeout_s=kv_fetch_timeout_s)
        return TransferService(RankLayers(layers, layout, self._shared), options)


def offer(
    service: TransferService, request_id: str, block_ids: Sequence[int], shape: CacheShape, lease_s: float = LEASE_S
) -> KvHandoff:
    """Publish these blocks as a finished prefill does, and return the hand-off."""
    handoff = KvHandoff(
        handoff_id=new_handoff_id(),
        addresses=(service.address,),
        num_blocks=len(block_ids),
        num_tokens=len(block_ids) * BLOCK_TOKENS,
        compatibility_hash="",
        lease_s=lease_s,
        num_bytes=shape.handoff_bytes(len(block_ids)),
    )
    service.publish(request_id, handoff.handoff_id, block_ids, handoff.num_tokens)
    return handoff


class SourceProcess:
    """A child process that owns a KV cache and serves it as an engine would: the parent's handle.

    Every wait has a deadline. `close`, or leaving the `with` block, ends the child, and so does the end of its parent.
    """

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
        params, cpu_s = self._ask(transport, request_id, tuple(block_ids))
        return KvHandoff.from_params(params), cpu_s

    def wait_freed(self, transport: TransportName, request_id: str) -> float:
        """Wait until the fetching side has released the blocks; return the CPU seconds the child has used so far.

        Raises MeasureError if they are not released in time.
        """
        freed, cpu_s = self._ask(transport, request_id, None)
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

    def _ask(self, transport: TransportName, request_id: str, block_ids: tuple[int, ...] | None) -> Any:
        try:
            self._pipe.send((transport, request_id, block_ids))
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
    """Run the child until the parent ends it, or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent as well, which then ends us
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    if core is not None:
        os.sched_setaffinity(0, {core})
    cache = Cache(shape, SOURCE_SEED)
    with ExitStack() as stack:
        services = {name: stack.enter_context(closing(cache.service(name))) for name in transports}
        for service in services.values():
            service.start()
        with suppress(EOFError, OSError):  # the parent is gone or has given up
            pipe.send({name: service.address for name, service in services.items()})
            while (asked := pipe.recv()) is not None:
                name, request_id, block_ids = asked
                if block_ids is None:
                    answer: Any = _wait_freed(services[name], request_id)
                else:
                    answer = offer(services[name], request_id, block_ids, shape).to_params()
                pipe.send((answer, time.process_time()))


def _wait_freed(service: TransferService, request_id: str) -> bool:
    """Poll, as an engine's step loop does, until this request's blocks are free again; return False if they stay."""
    deadline_s = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline_s:
        if request_id in service.poll().sent:
            return True
        service.wait(1.0)
    return False


def _end_with_parent() -> None:
    """Exit when the parent does, even if it was killed and whatever else this process is waiting for."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


@dataclass(frozen=True, slots=True)
class MeasureSettings:
    """The measurement's parameters. The defaults are SmolLM2-135M in bfloat16 and a prompt of 1700 tokens."""

    tokens: int = 1700
    """Prompt length, rounded up to whole blocks of 32 tokens."""
    layers: int = 30
    block_bytes: int = 24 << 10
    """Bytes of one block in one layer."""
    rounds: int = 20
    """Measured hand-offs for each transport, after one that warms up."""
    transports: tuple[str, ...] = field(default_factory=measurable_here)

    @property
    def num_blocks(self) -> int:
        """Blocks in one hand-off."""
        return math.ceil(self.tokens / BLOCK_TOKENS)

    @property
    def cache(self) -> CacheShape:
        """The shape of each side's cache."""
        return CacheShape(self.layers, CACHE_PER_HANDOFF * self.num_blocks, self.block_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes in one hand-off, over all layers."""
        return self.cache.handoff_bytes(self.num_blocks)

    def problems(self, memory_available_bytes: int) -> list[str]:
        """List the reasons why this cannot be measured here, each with its fix; empty if it can."""
        least = {"tokens": 1, "layers": 1, "block_bytes": 1, "rounds": LEAST_ROUNDS}
        wrong = [
            f"{name.replace('_', '-')} must be {value} or more, not {getattr(self, name)}"
            for name, value in least.items()
            if getattr(self, name) < value
        ]
        wrong += [
            f"transport {name!r} cannot be measured: give one or more of {', '.join(MEASURABLE)}"
            for name in self.transports
            if name not in MEASURABLE
        ]
        if "nixl" in self.transports and (missing := nixl_missing()) is not None:
            wrong.append(f"transport 'nixl' cannot be measured: {missing}")
        return wrong or list(self._wrong_sizes(memory_available_bytes))

    def _wrong_sizes(self, memory_available_bytes: int) -> Iterator[str]:
        if "shm" in self.transports and self.cache.num_bytes < SMALLEST_BYTES:
            more = math.ceil(SMALLEST_BYTES / (CACHE_PER_HANDOFF * self.layers * self.block_bytes)) * BLOCK_TOKENS
            yield (
                f"a cache of {self.cache.num_bytes} bytes is too small for shared memory, which takes at least "
                f"{SMALLEST_BYTES} bytes: raise tokens to {more}, raise layers or block-bytes, or leave shm out"
            )
        needed_bytes = COPIES_IN_MEMORY * self.num_bytes
        if needed_bytes > memory_available_bytes:
            yield (
                f"two caches and memcpy's buffers take {needed_bytes / 1e9:.2f} GB, of which "
                f"{memory_available_bytes / 1e9:.2f} GB are available: lower tokens or layers, or free memory"
            )


@dataclass(frozen=True, slots=True)
class TransferFigures:
    """The rounds of one transport, or of memcpy by one thread of this process."""

    transport: str
    num_bytes: int
    """Bytes in one hand-off."""
    latency_s: list[float] = field(default_factory=list)
    """Seconds of each round, from the request to the completion that the engine's step loop sees."""
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds of each round, both processes together, until the blocks are released."""

    @property
    def median_ms(self) -> float:
        """Median latency of a hand-off."""
        return statistics.median(self.latency_s) * 1e3

    @property
    def p90_ms(self) -> float:
        """90th percentile of a hand-off's latency."""
        return float(np.percentile(self.latency_s, 90)) * 1e3

    @property
    def gb_s(self) -> float:
        """Throughput at the median latency, in 10^9 bytes/s; a byte read and written counts once."""
        return self.num_bytes / 1e6 / self.median_ms

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU seconds for 10^9 bytes, the mean over the rounds."""
        return statistics.mean(self.cpu_s) / (self.num_bytes / 1e9)


@dataclass(frozen=True, slots=True)
class MeasureReport:
    """The result of `measure`."""

    settings: MeasureSettings
    cores: tuple[int, ...]
    """The source's and the target's core if each was pinned to one; else empty."""
    figures: tuple[TransferFigures, ...]
    """Of each transport that works here, then of memcpy."""
    refused: dict[str, str]
    """Transports that do not work here, with the reason."""


def measure(settings: MeasureSettings, on_progress: Callable[[str], None] = lambda _: None) -> MeasureReport:
    """Start the source, run all rounds and return the figures. The caller has checked `settings.problems`.

    Where there are two cores, each side gets one, this process's thread for as long as it runs. Raises MeasureError.
    """
    cores = tuple(usable_cores()[:2])
    pinned = cores if len(cores) == 2 else ()
    on_progress("starting the source process")
    with ExitStack() as stack:
        stack.enter_context(_pinned_to(pinned[1] if pinned else None))
        names = tuple(name for name in TRANSPORT_NAMES if name in settings.transports)
        source = stack.enter_context(SourceProcess(settings.cache, names, pinned[0] if pinned else None))
        source.start()
        cache = Cache(settings.cache)
        targets: dict[TransportName, TransferService] = {}
        refused: dict[str, str] = {}
        for name in names:
            on_progress(f"pairing over {name}")
            service = stack.enter_context(closing(cache.service(name)))
            service.start()
            answer = service.pair([source.addresses[name]]).result(FETCH_DEADLINE_S)[source.addresses[name]]
            if isinstance(answer, str):
                refused[name] = answer
            else:
                targets[name] = service
        if not targets:
            raise MeasureError("no transport works here: " + "; ".join(refused.values()))
        figures = _rounds(settings, source, targets, on_progress)
    return MeasureReport(settings, pinned, figures, refused)


def _rounds(
    settings: MeasureSettings,
    source: SourceProcess,
    targets: dict[TransportName, TransferService],
    on_progress: Callable[[str], None],
) -> tuple[TransferFigures, ...]:
    """Run every transport, then memcpy, once per round, after a round that warms up."""
    dice = random.Random(0)
    rows = {name: TransferFigures(name, settings.num_bytes) for name in targets}
    memcpy = TransferFigures("memcpy", settings.num_bytes)
    buffers = (torch.ones(settings.num_bytes, dtype=torch.uint8), torch.zeros(settings.num_bytes, dtype=torch.uint8))
    for index in range(-1, settings.rounds):
        on_progress("warming up" if index < 0 else f"round {index + 1} of {settings.rounds}")
        # Reverse every other round, so that no transport always follows the same one.
        for name in list(targets) if index % 2 else reversed(list(targets)):
            blocks = [dice.sample(range(settings.cache.num_blocks), settings.num_blocks) for _ in range(2)]
            took = _hand_over(source, targets[name], name, f"{name}-{index}", *blocks)
            if index >= 0:
                rows[name].latency_s.append(took[0])
                rows[name].cpu_s.append(took[1])
        copied_s = _copy(*buffers)
        if index >= 0:
            memcpy.latency_s.append(copied_s)
            memcpy.cpu_s.append(copied_s)
    return (*rows.values(), memcpy)


def _hand_over(
    source: SourceProcess,
    service: TransferService,
    name: TransportName,
    request_id: str,
    source_ids: list[int],
    target_ids: list[int],
) -> tuple[float, float]:
    """Return seconds until complete, and CPU seconds of both sides until the blocks were released.

    Raises MeasureError if the fetch failed or another transport carried it.
    """
    handoff, source_cpu_s = source.publish(name, request_id, source_ids)
    cpu_s, started_s = time.process_time(), time.perf_counter()
    service.start_fetch(request_id, handoff, {0: target_ids})
    while (result := service.poll().results.get(request_id)) is None:
        if time.perf_counter() - started_s > FETCH_DEADLINE_S + 5.0:
            raise MeasureError(
                f"a hand-off over {name} did not end in {FETCH_DEADLINE_S:.0f} s: lower tokens or layers"
            )
        service.wait(1.0)
    took_s = time.perf_counter() - started_s
    if result.outcome != "ok":
        raise MeasureError(f"a hand-off over {name} failed ({result.reason}): {result.message}")
    if (result.transport, result.num_bytes) != (name, handoff.num_bytes):
        raise MeasureError(f"{result.num_bytes} of {handoff.num_bytes} bytes came by {result.transport}, not by {name}")
    source_cpu_s = source.wait_freed(name, request_id) - source_cpu_s
    return took_s, time.process_time() - cpu_s + source_cpu_s


def _copy(source: torch.Tensor, target: torch.Tensor) -> float:
    """Return the seconds that one copy takes by one thread, between pages that are already resident."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        started_s = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - started_s
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _pinned_to(core: int | None) -> Iterator[None]:
    """Pin this thread, and the threads and processes it starts meanwhile; None: leave it as it is."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
