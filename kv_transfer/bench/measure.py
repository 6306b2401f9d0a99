"""Measure how fast one hand-off moves between two processes on this host, by transport, with memcpy as the baseline.

A child process owns the source and this one the target, both through `TransferService`, as in production. Transports
and layouts alternate hand-off by hand-off, so that a disturbance of the machine affects all of them alike. memcpy is
the baseline because no transfer can be faster than one copy of its bytes. The caches are in host memory: `cuda-ipc`
copies them by index as it would on a GPU, and its figures say nothing about one. `ridgeline bench transfer` prints the
result.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
import torch

from ridgeline.contracts.handoff import KvHandoff
from ridgeline.kv_transfer.bench.source_process import BLOCK_TOKENS, Cache, CacheShape, MeasureError, SourceProcess
from ridgeline.kv_transfer.memory.shared import SMALLEST_BYTES
from ridgeline.kv_transfer.names import TRANSPORT_NAMES, TransportName
from ridgeline.kv_transfer.nixl.library import why_missing as nixl_missing
from ridgeline.kv_transfer.service import TransferService
from ridgeline.roofline.process_cores import usable_cores

__all__ = ["MeasureError", "MeasureReport", "MeasureSettings", "TransferFigures", "measure"]

CONTIGUOUS: Final = "contiguous"
SCATTERED: Final = "scattered"
LAYOUTS: Final = (CONTIGUOUS, SCATTERED)
MEASURABLE: Final = tuple(name for name in TRANSPORT_NAMES if name != "auto")
"""The transports with figures of their own: `auto` picks one of the others."""

FETCH_DEADLINE_S: Final = 30.0
CACHE_PER_HANDOFF: Final = 2
"""Blocks in each side's cache for each block moved, so that there is room to scatter them."""
_COPIES_IN_MEMORY: Final = 2 * CACHE_PER_HANDOFF + 2
"""Copies of a hand-off's bytes held at once: two caches, and the source and target of memcpy."""
_WARM_UP_ROUNDS: Final = 1
_SEED: Final = 0


def measurable_here() -> tuple[str, ...]:
    """Return those of the measurable transports whose packages are installed."""
    return tuple(name for name in MEASURABLE if name != "nixl" or nixl_missing() is None)


OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MeasureSettings:
    """The measurement's parameters. The defaults are SmolLM2-135M in bfloat16 and a prompt of 1700 tokens."""

    tokens: int = 1700
    """Prompt length, rounded up to whole blocks of 32 tokens."""
    layers: int = 30
    block_bytes: int = 24 << 10
    """Bytes of one block in one layer."""
    rounds: int = 20
    """Measured hand-offs for each transport and layout, after one that warms up."""
    transports: tuple[str, ...] = field(default_factory=measurable_here)
    layouts: tuple[str, ...] = LAYOUTS
    pin: bool | None = None
    """Whether each side gets a core to itself; None: if there are at least two cores."""

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

    def problems(self, memory_available_bytes: int, usable_cores: int) -> list[str]:
        """List the reasons why this cannot be measured here, each with its fix; empty if it can."""
        wrong = [*self._wrong_numbers(), *self._wrong_names()]
        if self.pin and usable_cores < 2:
            wrong.append(f"pin needs 2 cores, one for each side, and {usable_cores} is usable here: use --no-pin")
        return wrong or list(self._wrong_sizes(memory_available_bytes))

    def _wrong_numbers(self) -> Iterator[str]:
        for name, least in (("tokens", 1), ("layers", 1), ("block_bytes", 1), ("rounds", 3)):
            value = getattr(self, name)
            if value < least:
                yield f"{name.replace('_', '-')} must be {least} or more, not {value}"

    def _wrong_names(self) -> Iterator[str]:
        for kind, names, known in (
            ("transport", self.transports, MEASURABLE),
            ("layout", self.layouts, LAYOUTS),
        ):
            if not names:
                yield f"no {kind} is given: give one or more of {', '.join(known)}"
            for name in names:
                if name not in known:
                    yield f"{kind} {name!r} cannot be measured: give one or more of {', '.join(known)}"
        if "nixl" in self.transports and (missing := nixl_missing()) is not None:
            yield f"transport 'nixl' cannot be measured: {missing}"

    def _wrong_sizes(self, memory_available_bytes: int) -> Iterator[str]:
        mapped = [name for name in ("shm", "cuda-ipc") if name in self.transports]
        if mapped and self.cache.num_bytes < SMALLEST_BYTES:
            more = math.ceil(SMALLEST_BYTES / (CACHE_PER_HANDOFF * self.layers * self.block_bytes)) * BLOCK_TOKENS
            yield (
                f"a cache of {self.cache.num_bytes} bytes is too small for shared memory, which takes at least "
                f"{SMALLEST_BYTES} bytes: raise tokens to {more}, raise layers or block-bytes, or leave "
                f"{' and '.join(mapped)} out"
            )
        needed_bytes = _COPIES_IN_MEMORY * self.num_bytes
        if needed_bytes > memory_available_bytes:
            yield (
                f"two caches and memcpy's buffers take {needed_bytes / 1e9:.2f} GB, of which "
                f"{memory_available_bytes / 1e9:.2f} GB are available: lower tokens or layers, or free memory"
            )


@dataclass(frozen=True, slots=True)
class TransferFigures:
    """The figures of one transport with one layout of blocks."""

    transport: str
    layout: str
    num_bytes: int
    """Bytes in one hand-off."""
    latency_s: tuple[float, ...]
    """Seconds of each round, from the request to the completion that the engine's step loop sees."""
    cpu_s: tuple[float, ...]
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
        """Throughput at the median latency, in 10^9 bytes/s."""
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
    memcpy_s: tuple[float, ...]
    """Seconds of each round for one copy of a hand-off's bytes by one thread of this process."""
    figures: tuple[TransferFigures, ...]
    refused: dict[str, str]
    """Transports that do not work here, with the reason."""

    @property
    def memcpy_gb_s(self) -> float:
        """Bytes copied per second (10^9) at the median; a byte read and written counts once."""
        return self.settings.num_bytes / 1e9 / statistics.median(self.memcpy_s)

    def ratio(self, figures: TransferFigures) -> float:
        """Return this throughput as a fraction of memcpy's."""
        return figures.gb_s / self.memcpy_gb_s

    def to_dict(self) -> dict[str, Any]:
        """Return settings, figures and the values of every round, ready for JSON."""
        return {
            "settings": asdict(self.settings),
            "handoff": {"blocks": self.settings.num_blocks, "bytes": self.settings.num_bytes},
            "cores": list(self.cores),
            "memcpy_gb_s": self.memcpy_gb_s,
            "memcpy_s": list(self.memcpy_s),
            "transfers": [
                {
                    "transport": row.transport,
                    "layout": row.layout,
                    "gb_s": row.gb_s,
                    "ratio_to_memcpy": self.ratio(row),
                    "median_ms": row.median_ms,
                    "p90_ms": row.p90_ms,
                    "cpu_s_per_gb": row.cpu_s_per_gb,
                    "latency_s": list(row.latency_s),
                    "cpu_s": list(row.cpu_s),
                }
                for row in self.figures
            ],
            "refused": dict(self.refused),
        }


def measure(settings: MeasureSettings, on_progress: OnProgress = lambda _: None) -> MeasureReport:
    """Start the source, run all rounds and return the figures. The caller has checked `settings.problems`.

    While it runs, the calling thread may be pinned to one core. Raises MeasureError.
    """
    cores = usable_cores()[:2] if settings.pin is not False else []
    pinned = tuple(cores) if len(cores) == 2 else ()
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
            service = stack.enter_context(closing(cache.service(name, fetch_deadline_s=FETCH_DEADLINE_S)))
            service.start()
            answer = service.pair([source.addresses[name]]).result(FETCH_DEADLINE_S)[source.addresses[name]]
            if isinstance(answer, str):
                refused[name] = answer
            else:
                targets[name] = service
        if not targets:
            raise MeasureError("no transport works here: " + "; ".join(refused.values()))
        rounds = _Rounds(settings, source, targets)
        rounds.run(on_progress)
    return MeasureReport(settings, pinned, tuple(rounds.memcpy_s), rounds.figures(), refused)


@dataclass(slots=True)
class _Timings:
    latency_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


class _Rounds:
    """Runs every transport with every layout, and memcpy, once per round."""

    def __init__(
        self, settings: MeasureSettings, source: SourceProcess, targets: dict[TransportName, TransferService]
    ) -> None:
        self._settings = settings
        self._source = source
        self._targets = targets
        self._random = random.Random(_SEED)
        self._copy = _Memcpy(settings.num_bytes)
        self._timings = {(name, layout): _Timings() for name in targets for layout in settings.layouts}
        self.memcpy_s: list[float] = []

    def run(self, on_progress: OnProgress) -> None:
        """Run the warm-up round, then the measured ones."""
        for index in range(-_WARM_UP_ROUNDS, self._settings.rounds):
            on_progress("warming up" if index < 0 else f"round {index + 1} of {self._settings.rounds}")
            turns = list(self._timings)
            # Reverse every other round, so that no transport always follows the same one.
            for name, layout in turns if index % 2 else reversed(turns):
                latency_s, cpu_s = self._hand_over(name, layout, f"{name}-{layout}-{index}")
                if index >= 0:
                    self._timings[name, layout].latency_s.append(latency_s)
                    self._timings[name, layout].cpu_s.append(cpu_s)
            copied_s = self._copy.run()
            if index >= 0:
                self.memcpy_s.append(copied_s)

    def figures(self) -> tuple[TransferFigures, ...]:
        """Return the figures in the order of transports, then layouts."""
        return tuple(
            TransferFigures(name, layout, self._settings.num_bytes, tuple(timings.latency_s), tuple(timings.cpu_s))
            for (name, layout), timings in self._timings.items()
        )

    def _hand_over(self, name: TransportName, layout: str, request_id: str) -> tuple[float, float]:
        """Return seconds until complete, and CPU seconds of both sides until the blocks were released."""
        handoff, source_cpu_s = self._source.publish(name, request_id, self._block_ids(layout))
        target_ids, cpu_s = self._block_ids(layout), time.process_time()
        latency_s = _fetch(self._targets[name], name, request_id, handoff, target_ids)
        source_cpu_s = self._source.wait_freed(name, request_id) - source_cpu_s
        return latency_s, time.process_time() - cpu_s + source_cpu_s

    def _block_ids(self, layout: str) -> list[int]:
        count, cache_blocks = self._settings.num_blocks, self._settings.cache.num_blocks
        if layout == SCATTERED:
            return self._random.sample(range(cache_blocks), count)
        first = self._random.randrange(cache_blocks - count + 1)
        return list(range(first, first + count))


def _fetch(service: TransferService, name: str, request_id: str, handoff: KvHandoff, target_ids: list[int]) -> float:
    """Return the seconds from the request to its completion.

    Raises MeasureError if the fetch failed or another transport carried it.
    """
    deadline_s = time.monotonic() + FETCH_DEADLINE_S + 5.0
    started_s = time.perf_counter()
    service.start_fetch(request_id, handoff, 0, target_ids)
    while time.monotonic() < deadline_s:
        service.wait(1.0)
        result = service.poll().results.get(request_id)
        if result is None:
            continue
        took_s = time.perf_counter() - started_s
        if result.outcome != "ok":
            raise MeasureError(f"a hand-off over {name} failed ({result.reason}): {result.message}")
        if (result.transport, result.num_bytes) != (name, handoff.num_bytes):
            raise MeasureError(
                f"{result.num_bytes} of {handoff.num_bytes} bytes came by {result.transport}, not by {name}"
            )
        return took_s
    raise MeasureError(f"a hand-off over {name} did not end within {FETCH_DEADLINE_S:.0f} s: lower tokens or layers")


class _Memcpy:
    """Copies a number of bytes by one thread, between pages that are already resident."""

    def __init__(self, num_bytes: int) -> None:
        self._source = torch.ones(num_bytes, dtype=torch.uint8)
        self._target = torch.full((num_bytes,), 2, dtype=torch.uint8)

    def run(self) -> float:
        """Return the seconds that one copy takes."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            started_s = time.perf_counter()
            self._target.copy_(self._source)
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
