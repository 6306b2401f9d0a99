"""What a router and the dispatcher tell each other: one stream of batches each way, and a call for operators.

What they tell of requests is in `ridgeline.router.placement.placement_events`.
"""

from __future__ import annotations

import msgspec

from ridgeline.contracts.tasks import Adapter
from ridgeline.contracts.vocabulary import Mode, Pool
from ridgeline.router.fleet.pairing import KvPair
from ridgeline.router.fleet.worker import Outstanding
from ridgeline.router.flow.admission import Held
from ridgeline.router.placement.placement_events import Denied, Event, Granted
from ridgeline.router.placement.pool_queue import QueueNow
from ridgeline.router.settings import RouterStart

SERVICE = "ridgeline.Dispatcher"
# router to dispatcher


class Joins(msgspec.Struct, frozen=True, tag="joins"):
    """The first message of a router."""

    router: RouterStart


class Holds(msgspec.Struct, frozen=True, tag="holds"):
    """What has changed of what this router has admitted and not ended."""

    changed: dict[str, Held]
    """By client, what it holds now."""
    sequences_per_s: float = 0.0
    blocks_per_s: float = 0.0


class Complete(msgspec.Struct, frozen=True, tag="complete"):
    """All has been told that a dispatcher must know of a router that joins."""


Up = Event | Joins | Holds | Complete


class Ups(msgspec.Struct, frozen=True):
    """A batch of messages to the dispatcher."""

    messages: list[Up]


# dispatcher to router


class Sums(msgspec.Struct, frozen=True, tag="sums"):
    """What only the dispatcher knows: the same for all routers."""

    mode: Mode
    role_number: int
    queues: dict[Pool, QueueNow]
    outstanding: dict[str, Outstanding]
    """By worker id."""


class Others(msgspec.Struct, frozen=True, tag="others"):
    """What has changed of what the other routers hold together."""

    whole: bool
    """Whether what was told before does not count any more."""
    changed: dict[str, Held]
    """By client, what they hold now."""
    sequences_per_s: float
    blocks_per_s: float


class Pairs(msgspec.Struct, frozen=True, tag="pairs"):
    """The pairs of workers that can exchange KV, told when they have changed."""

    kv_pairs: list[KvPair]


class Offered(msgspec.Struct, frozen=True, tag="offered"):
    """The LoRA adapters that requests can choose, told when they have changed."""

    adapters: list[Adapter]


Down = Granted | Denied | Sums | Others | Pairs | Offered


class Downs(msgspec.Struct, frozen=True):
    """A batch of messages to a router."""

    messages: list[Down]


class EncodedDowns(msgspec.Struct, frozen=True):
    """`Downs` as the dispatcher sends them: what all routers are told is encoded once."""

    messages: list[Down | msgspec.Raw]


# calls


class ChangeMode(msgspec.Struct, frozen=True):
    """An operator changes the mode, at one of the routers."""

    mode: Mode


class ChangeAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An operator loads a LoRA adapter, or unloads it."""

    name: str
    path: str = ""
    """Where its files are; empty: unload it."""
    in_place: bool = False


class AdapterChanged(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: whether there was one to unload, or the sentence that says why nothing has changed."""

    found: bool = True
    refused: str = ""


class ModeChanged(msgspec.Struct, frozen=True):
    """The answer: what it did, or the sentence that says why not."""

    rerouted_prompts: int = 0
    took_s: float = 0.0
    refused: str = ""
