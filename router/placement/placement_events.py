"""What a router tells a `ClusterState` of its requests, and what it is answered; by gRPC if several routers share one.

Every request begins with `Wants`, or `Keeps` if another dispatcher had placed it, and ends with `Leaves`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ridgeline.router.fleet.prefixes import BlockHashes
from ridgeline.router.fleet.request_route import Demand, Route
from ridgeline.router.scheduler.features import Assignment

Step = Literal["prompt_done", "prompt_left", "decode_began"]
"""Its first token has arrived; it has left the worker that computed its prompt; the worker that decodes has sent a
token, and so reports its KV blocks."""
Reason = Literal["no_worker", "lost", "draining", "failed"]


class Reuse(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of a prompt, which another worker should have in its prefix cache."""

    worker_id: str
    incarnation: str
    tokens: int
    """How many tokens it should have."""
    compute_s: float
    """The seconds that it would take to compute what is fetched."""


class Reused(msgspec.Struct, frozen=True, array_like=True):
    """What came of a `Reuse`, once the worker has answered."""

    wanted: Reuse
    cached_tokens: int
    """How many tokens it had."""
    kv_bytes: int = 0
    """What was fetched; 0 if nothing was."""
    wire_s: float = 0.0
    waited_s: float = 0.0
    """From the question to the first byte."""


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What is learned from a complete answer."""

    output_tokens: int
    kv_bytes: int = 0
    """Of its hand-off, if it was whole."""
    wire_s: float = 0.0
    """The seconds that took."""
    prefix: BlockHashes = ()
    """The blocks of prompt and answer together, which the worker that decoded has now."""
    overhead_s: float | None = None
    """See `RequestTimeline.overhead_s`."""
    ttft_s: float | None = None
    """What its client saw; None without any token."""
    tpot_s: float | None = None
    """None with less than two tokens."""
    reused: Reused | None = None


class Wants(msgspec.Struct, frozen=True, tag="wants"):
    """A prompt wants to start."""

    number: int
    """Unique for its router."""
    demand: Demand


class Keeps(msgspec.Struct, frozen=True, tag="keeps"):
    """A request runs where another dispatcher had placed it."""

    number: int
    demand: Demand
    route: Route
    prompt_worker: str
    decode_worker: str | None
    steps: tuple[Step, ...]
    """What has happened there since."""


class Happened(msgspec.Struct, frozen=True, tag="happened"):
    """A step of a request that was placed. May be told twice."""

    number: int
    step: Step
    cached_tokens: int | None = None
    """Of `prompt_done`: how many of its tokens were in the prefix cache of the worker; None if not known."""


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """An answer is complete."""

    number: int
    answer: Answer


class Leaves(msgspec.Struct, frozen=True, tag="leaves"):
    """A request has ended, or its place is no longer wanted."""

    number: int


class Forgets(msgspec.Struct, frozen=True, tag="forgets"):
    """The workers' prefix caches were emptied, through this router."""


class Doubts(msgspec.Struct, frozen=True, tag="doubts"):
    """A worker has failed or refused a request of this router."""

    worker_id: str
    incarnation: str


Event = Wants | Keeps | Happened | Answered | Leaves | Forgets | Doubts


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    """A prompt may start, on these incarnations of workers."""

    number: int
    route: Route
    prompt_worker: tuple[str, str]
    """Worker id and incarnation."""
    decode_worker: tuple[str, str] | None
    """None unless another worker decodes."""
    assignment: Assignment | None = None
    """Why these, if a policy chose them."""
    reuse: Reuse | None = None
    """What the worker that computes the prompt had better fetch."""


class Denied(msgspec.Struct, frozen=True, tag="denied"):
    """A prompt gets no place."""

    number: int
    reason: Reason
    sentence: str
