"""What happens to a scheduler: the lines of a recording. No text of a prompt or an answer is among them.

A recording begins with `Began` and has everything else in the order in which it happened. Times are in seconds on the
clock of the process that decides. `ridgeline.router.scheduler.replay` decides again from it, and
`ridgeline.router.scheduler.offline_simulation` serves its requests by another policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from ridgeline.contracts.handoff import UNREADABLE
from ridgeline.contracts.vocabulary import Mode, RebalanceMode
from ridgeline.contracts.workers import StepModel
from ridgeline.router.scheduler.features import Assignment, FleetModel, RequestFeatures, WorkerState

Options = dict[str, bool | int | float | str]


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line."""

    at_s: float


class Arrived(Event, frozen=True, tag="arrived"):
    """A request has come."""

    number: int
    prompt_tokens: int
    ttft_slo_s: float = math.inf
    tpot_slo_s: float = math.inf
    expected_tokens: float = 0.0
    """Of its answer, as far as was known then."""


def limit(value_s: float) -> float:
    """Return an SLO so that none is left out of a line: msgspec omits a default that is the same object."""
    return math.inf if value_s == math.inf else value_s


class PromptComputed(Event, frozen=True, tag="prompt_computed"):
    """Its first token has come."""

    number: int
    cached_tokens: int
    """Tokens of its prompt that its worker had."""


class AnswerCompleted(Event, frozen=True, tag="answered"):
    """Its answer is complete."""

    number: int
    output_tokens: int
    ttft_s: float | None = None
    """What its client saw; None without any token."""
    tpot_s: float | None = None
    """None with less than two tokens."""


class SeenWorker(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker as a decision saw it: a `WorkerState`."""

    worker_id: str
    model: StepModel
    step_tokens: int
    turns: int
    prompt_tokens: int
    prompts_s: float
    running: int
    decodes: int
    context_tokens: float
    takes_prompt: bool
    room: bool
    cached: int = 0

    @classmethod
    def of(cls, worker: WorkerState, request: RequestFeatures) -> SeenWorker:
        """Keep what a policy may ask of a worker about this request."""
        copied = {name: getattr(worker, name) for name in cls.__struct_fields__ if name not in ("room", "cached")}
        return cls(**copied, room=worker.has_room(request), cached=worker.cached_tokens(request))

    def has_room(self, request: RequestFeatures) -> bool:
        """Return whether it had room for the request."""
        return self.room

    def cached_tokens(self, request: RequestFeatures) -> int:
        """Return how many tokens of the prompt it was expected to have."""
        return self.cached


class Placed(Event, frozen=True, tag="placed"):
    """A policy has chosen the workers of a request."""

    policy: str
    request: RequestFeatures
    workers: list[SeenWorker]
    prompt_worker: str
    decode_worker: str
    reason: str

    @classmethod
    def of(
        cls,
        at_s: float,
        policy: str,
        request: RequestFeatures,
        workers: Sequence[WorkerState],
        assigned: Assignment,
    ) -> Placed:
        """Keep all that a policy went by, and what it answered."""
        slos = {name: limit(getattr(request, name)) for name in ("ttft_slo_s", "tpot_slo_s")}
        return cls(
            at_s,
            policy,
            msgspec.structs.replace(request, **slos),
            [SeenWorker.of(worker, request) for worker in workers],
            assigned.prompt_worker,
            assigned.decode_worker,
            assigned.reason,
        )


class Compared(Event, frozen=True, tag="compared"):
    """Mode adaptive begins to compare policies, on this fleet."""

    fleet: FleetModel
    serves_since: int
    """The number of the first request that came after the present policy began to serve."""


class Chose(Event, frozen=True, tag="chose"):
    """The comparison has ended, and requests are served by this policy from now on."""

    policy: str
    scores: Mapping[str, float]


class Began(Event, frozen=True, tag="began"):
    """The state at the beginning of a recording."""

    mode: Mode
    policy: str
    """By which mode adaptive serves."""
    options: Options
    """Of that policy, if it always serves."""
    rebalance: RebalanceMode
    always: bool
    arrived: int
    next_comparison: int
    requests: list[tuple[Arrived, int, bool, float | None]]
    """The latest ones, how many tokens each has made, whether it has ended, and its latency in seconds."""
    fleet: FleetModel | None = None
    """The workers that are known, if any steps are."""


class FleetSeen(Event, frozen=True, tag="fleet"):
    """The workers, as they are known now: their speed changes, and so do the fits of their models."""

    fleet: FleetModel


class ModeBecame(Event, frozen=True, tag="mode"):
    """An operator has changed the mode."""

    mode: Mode


class Stopped(Event, frozen=True, tag="stopped"):
    """The recording ends here."""

    reason: str


AnyEvent = (
    Began | Arrived | PromptComputed | AnswerCompleted | Placed | FleetSeen | Compared | Chose | ModeBecame | Stopped
)
Listener = Callable[[AnyEvent], None]


class BadRecording(ValueError):
    """A file is not a recording of this version."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyEvent)


def line_of(event: AnyEvent) -> bytes:
    """Return an event as a line of a recording."""
    return _encoder.encode(event) + b"\n"


def read_recording(lines: Iterable[bytes], name: str) -> Iterator[AnyEvent]:
    """Yield the events of a recording; a last line that was cut off is left out. Raises BadRecording."""
    number = 0
    for number, line in enumerate(lines, 1):
        try:
            event = _decoder.decode(line)
        except UNREADABLE as error:
            if not line.endswith(b"\n") and number > 1:
                return
            raise BadRecording(
                f"{name}, line {number}: {error}; `ridgeline record` of this version writes what can be read here"
            ) from error
        if number == 1 and not isinstance(event, Began):
            raise BadRecording(f"{name} does not begin as a recording does: was its beginning cut off?")
        yield event
    if not number:
        raise BadRecording(f"{name} is empty: `ridgeline record` writes at least one line")
