"""Pulls that fail on purpose, reproducibly for a given seed: the setting `transfer.faults`.

`FaultyPuller` wraps any transport's puller. What happens to the n-th pull depends only on the plan's seed and on n, not
on time or on other pulls, so a failure that a test found can be reproduced. `TransferOptions.faults` wraps every puller
that `make_transport` builds.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import fields
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from ridgeline.contracts import errors
from ridgeline.kv_transfer.interfaces import Pull, Puller, SourceDescription

Probability = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
FaultKind = Literal["none", "delay", "drop", "corrupt", "cut"]
_PROBABILITIES: Final[tuple[FaultKind, ...]] = ("delay", "drop", "corrupt", "cut")
_LOOK_S: Final = 0.001
"""Interval at which a pull that is to be cut is checked."""


class Fault(NamedTuple):
    """The fault of one pull."""

    kind: FaultKind
    amount: float
    """A fraction in [0, 1): of the longest delay, of the bytes before a cut, or the place of the corrupted block."""
    noise_seed: int


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FaultPlan:
    """How often each fault happens: probabilities, with at most one fault per pull."""

    seed: int = 0
    delay: Probability = 0.0
    """Probability that the pull begins late."""
    drop: Probability = 0.0
    """Probability that nobody answers: `timeout`."""
    corrupt: Probability = 0.0
    """Probability that the bytes arrive with one block wrong, and a checksum detects it: `corrupted`."""
    cut: Probability = 0.0
    """Probability that the connection breaks, after none, some or all of the bytes: `unreachable`."""
    longest_delay_s: Seconds = 0.05
    longest_drop_s: Seconds = 1.0
    """A dropped pull fails at its own deadline, but not later than this."""

    @model_validator(mode="after")
    def _sum(self) -> FaultPlan:
        total = math.fsum(getattr(self, name) for name in _PROBABILITIES)
        if total > 1 + 1e-9:
            raise ValueError(f"{', '.join(_PROBABILITIES)} add up to {total:g}: lower them to 1 or less in all")
        return self

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        """Parse a setting such as `seed=7,drop=0.05,delay=0.2`; missing names keep their defaults.

        Raises ValueError that names the bad part.
        """
        parts = [part.partition("=") for part in text.split(",") if part.strip()]
        values: dict[str, Any] = {name.strip(): value.strip() for name, _, value in parts}
        if len(values) < len(parts):
            raise ValueError(f"fault plan: a name is given twice in {text!r}: leave one out")
        try:
            return cls(**values)
        except ValidationError as error:
            wrong = "; ".join(": ".join([*map(str, each["loc"]), each["msg"]]) for each in error.errors())
            names = ", ".join(field.name for field in fields(cls))
            raise ValueError(f"fault plan: {wrong}. Write it as drop=0.05,delay=0.2 with some of {names}") from error

    def fault(self, index: int) -> Fault:
        """Return what happens to pull number `index`, counted from 0."""
        dice = random.Random(f"{self.seed}/{index}")
        rolled, amount, noise_seed = dice.random(), dice.random(), dice.getrandbits(32)
        for kind in _PROBABILITIES:
            rolled -= getattr(self, kind)
            if rolled < 0:
                return Fault(kind, amount, noise_seed)
        return Fault("none", amount, noise_seed)


class FaultyPuller(Puller):
    """Behaves like the puller it wraps, except for the faults; like that one, it writes nothing after a pull's end."""

    def __init__(self, wrapped: Puller, plan: FaultPlan) -> None:
        self._wrapped = wrapped
        self._plan = plan
        self._pulls = 0
        self.name, self.covered_by_tls = wrapped.name, wrapped.covered_by_tls

    def unsupported_reason(self, source: SourceDescription) -> str | None:
        return self._wrapped.unsupported_reason(source)

    async def pull(self, pull: Pull) -> None:
        fault = self._plan.fault(self._pulls)
        self._pulls += 1
        if fault.kind == "drop":
            await self._drop(pull)
        elif fault.kind == "cut":
            await self._cut(pull, fault)
        else:
            if fault.kind == "delay":
                await asyncio.sleep(fault.amount * self._plan.longest_delay_s)
            await self._wrapped.pull(pull)
            if fault.kind == "corrupt":
                _corrupt(pull, fault)

    def forget(self, source: SourceDescription) -> None:
        self._wrapped.forget(source)

    async def close(self) -> None:
        await self._wrapped.close()

    async def _drop(self, pull: Pull) -> None:
        left_s = max(0.0, pull.give_up_at_s - time.monotonic())
        await asyncio.sleep(min(left_s, self._plan.longest_drop_s))
        raise errors.TransferFailed(errors.TIMEOUT, f"{pull.address} did not answer (a fault made for a test)")

    async def _cut(self, pull: Pull, fault: Fault) -> None:
        """Cut the transfer.

        A small one may be over before that: then it is as if the source's last message was lost.
        """
        progress = pull.progress
        total_bytes = len(pull.target_block_ids) * pull.pool.num_layers * pull.pool.block_bytes
        enough_bytes = progress.num_bytes + fault.amount * total_bytes
        real = asyncio.ensure_future(self._wrapped.pull(pull))
        try:
            while not real.done() and progress.num_bytes <= enough_bytes:
                await asyncio.wait((real,), timeout=_LOOK_S)
        finally:
            await _end(real)
        if not real.cancelled():
            real.result()  # a failure of its own counts as that failure
        progress.first_token = None  # it comes with the end of the stream, which was cut off
        raise errors.TransferFailed(errors.UNREACHABLE, f"{pull.address} went away (a fault made for a test)")


def _corrupt(pull: Pull, fault: Fault) -> None:
    """Overwrite one target block with another layer's bytes, and fail as a checksum would.

    The bytes are not noise, because noise may hold NaN. Real transports never write unchecked bytes, and attention
    kernels multiply the unused slots of a block by zero, so a NaN left there would reach the block's next user.
    """
    pool, dice = pull.pool, random.Random(fault.noise_seed)
    if pull.target_block_ids and pool.num_layers > 1:
        block_id = pull.target_block_ids[int(fault.amount * len(pull.target_block_ids))]
        layer = dice.randrange(pool.num_layers)
        other = bytes(pool.read((layer + 1) % pool.num_layers, [block_id])[0])
        pool.write(layer, [block_id], memoryview(other))
    pull.progress.first_token = None
    raise errors.TransferFailed(errors.CORRUPTED, f"a checksum from {pull.address} is wrong (a fault made for a test)")


async def _end(task: asyncio.Future[None]) -> None:
    """Cancel the task and return only when it has ended, even if we are cancelled meanwhile."""
    task.cancel()
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    if not task.cancelled():
        task.exception()  # retrieve the exception, so that asyncio does not log it
    if cancelled:
        raise asyncio.CancelledError
