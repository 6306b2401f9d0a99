"""What a router and the dispatcher tell each other: one stream of batches each way, and two calls for operators.

What they tell of requests is in `ridgeline.router.placement.placement_events`.
"""

from __future__ import annotations

import msgspec

from ridgeline.contracts.vocabulary import Mode, Pool
from ridgeline.router.fleet.pairing import KvPair
from ridgeline.router.fleet.worker import Outstanding
from ridgeline.router.flow.admission import Held
from ridgeline.router.placement.placement_events import Denied, Event, Granted
from ridgeline.router.placement.pool_queue import QueueNow
from ridgeline.router.settings import RouterStart

SERVICE = "ridgeline.Dispatcher"
Samples = list[tuple[str, dict[str, str], float]]
"""Samples of Prometheus series: name, labels, value."""


class Told(msgspec.Struct, frozen=True, array_like=True):
    """What a router has counted, as far as the next dispatcher does not hear it from the router itself."""

    number: int
    """That of the newest process, see `RouterStart`."""
    before: Samples
    """What its former processes had counted together."""
    counted: Samples
    """What the newest one had, if it is gone."""


EndedRouters = dict[str, Told]
"""By the router's name; see `ridgeline.router.shared.counts`."""


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


class Counted(msgspec.Struct, frozen=True, tag="counted"):
    """This router's request series."""

    samples: Samples
    number: int = 0
    """Of the last `Count` that it answers; earlier ones are answered too."""


class Remembers(msgspec.Struct, frozen=True, tag="remembers"):
    """What a former dispatcher had told of routers that are gone."""

    ended: EndedRouters


class Complete(msgspec.Struct, frozen=True, tag="complete"):
    """All has been told that a dispatcher must know of a router that joins."""


Up = Event | Joins | Holds | Counted | Remembers | Complete


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


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """What routers had counted that are gone, for the next dispatcher."""

    routers: EndedRouters


class Count(msgspec.Struct, frozen=True, tag="count"):
    """The dispatcher wants the router's request series."""

    number: int


Down = Granted | Denied | Sums | Others | Pairs | Ended | Count


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


class ModeChanged(msgspec.Struct, frozen=True):
    """The answer: what it did, or the sentence that says why not."""

    rerouted_prompts: int = 0
    took_s: float = 0.0
    refused: str = ""


class CountOthers(msgspec.Struct, frozen=True):
    """A router wants the request series of all others, for a scrape, and tells its own, as it will show them."""

    router: RouterStart
    samples: Samples


class OthersCounted(msgspec.Struct, frozen=True):
    """Their sums, with what routers had counted that are gone."""

    samples: Samples
