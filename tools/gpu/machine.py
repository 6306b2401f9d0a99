"""The device under test and its clock. A dry run has host tensors, small sizes, and figures that mean nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Work = Callable[[], object]


@dataclass(frozen=True)
class Machine:
    """One device; `dry` says that it is this host's memory."""

    device: torch.device
    dry: bool

    @property
    def name(self) -> str:
        """The name that the driver gives it."""
        return "host tensors" if self.dry else torch.cuda.get_device_name(self.device)

    @property
    def memory_bytes(self) -> int:
        """All of its memory; 0 in a dry run."""
        return 0 if self.dry else int(torch.cuda.get_device_properties(self.device).total_memory)

    @property
    def capability(self) -> tuple[int, int]:
        """Its compute capability; (0, 0) in a dry run."""
        return (0, 0) if self.dry else torch.cuda.get_device_capability(self.device)

    def size(self, real: int, dry: int) -> int:
        """Return one of two sizes."""
        return dry if self.dry else real

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if not self.dry:
            torch.cuda.synchronize(self.device)

    def noise(self, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return any bits, NaNs among them, as a tensor of this type."""
        item_bytes = torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * item_bytes), dtype=torch.uint8, device=self.device)
        return raw.view(dtype)

    def seconds(self, work: Work, rounds: int = 20) -> float:
        """Return the median time of one call, on the device's own clock; the first calls are not counted."""
        rounds = self.size(rounds, 3)
        for _ in range(self.size(3, 1)):
            work()
        self.synchronize()
        return statistics.median(self._once(work) for _ in range(rounds))

    def _once(self, work: Work) -> float:
        if self.dry:
            began_s = time.perf_counter()
            work()
            return time.perf_counter() - began_s
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def wall_seconds(machine: Machine, work: Work, rounds: int = 20) -> float:
    """Return the median time of one call that synchronises by itself, on the host's clock."""
    work()
    machine.synchronize()
    taken = []
    for _ in range(machine.size(rounds, 3)):
        began_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)
