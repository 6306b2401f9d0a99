"""The state that the live page shows: one event of its stream, and the answer of GET /ridgeline/state.

Base units throughout: seconds, bytes, FLOP, tokens; a ratio is of 1. Figures are of the last `window_s` seconds, those
of `promise` of its own. None is not known, never 0.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ridgeline.contracts.vocabulary import Mode, Pool
from ridgeline.router.observe.ended_requests import ChosenWorkers

SCHEMA = "ridgeline.state/1"
ResourceId = Literal["router", "prefill", "link", "kv", "bandwidth"]
"""In the order in which a request meets them."""
Severity = Literal["ok", "idle", "short", "fault"]
Level = Literal["short", "full", "ok", "idle", "fault", "unused"]
WorkerState = Literal["ready", "starting", "draining", "lost", "away"]
"""`away` workers were lost again and again, and are tried again after a while."""


class Quantiles(msgspec.Struct, frozen=True):
    """Quantiles of a latency, in seconds."""

    p50: float
    p90: float
    p99: float


class DeploymentNow(msgspec.Struct, frozen=True):
    """What is served."""

    name: str
    model: str
    mode: Mode
    mode_is_for: str
    """What whoever chose it by this router said, such as the round of a comparison; or empty."""
    modes: list[Mode]
    """To choose from."""
    uptime_s: float


class Action(msgspec.Struct, frozen=True):
    """What would help."""

    do: Literal["scale", "mode", "none"]
    """`none`: the page cannot do it, and shows the command."""
    label: str
    command: str
    args: dict[str, str | int] = {}
    expect: str = ""
    live: bool = False


class Verdict(msgspec.Struct, frozen=True):
    """The sentence: `ridgeline.roofline.bottleneck`, and before it lost workers and an idle deployment."""

    kind: str
    """The resource that is short as `bottleneck` names it, or worker_lost, empty, none."""
    severity: Severity
    resource: ResourceId | None
    worker: str | None
    since_s: float
    """For how long it has been so."""
    sentence: str
    advice: str | None
    action: Action | None


class ResourceUse(msgspec.Struct, frozen=True):
    """How much of a resource is in use."""

    id: ResourceId
    name: str
    use_ratio: float | None
    of: str
    """Says of what the ratio is a part."""
    short_from_ratio: float
    """From here it counts as short, if there is a queue or an SLO is missed."""
    state: Level
    detail: str


class PromisedSlo(msgspec.Struct, frozen=True):
    """The limits of `router.slo`; requests may bring their own."""

    ttft_s: float | None
    tpot_s: float | None
    goal_ratio: float


class Promise(msgspec.Struct, frozen=True):
    """What clients get: of the sequences of this router that ended within `window_s`."""

    window_s: float
    sequences: int
    slo: PromisedSlo
    ttft_s: Quantiles | None
    tpot_s: Quantiles | None
    itl_s: Quantiles | None
    """Interpolated within the buckets of `ridgeline_itl_seconds`; the others are exact."""
    attainment_ratio: float | None
    ttft_attainment_ratio: float | None
    tpot_attainment_ratio: float | None
    """Shares of the sequences that `EndedRequest.slos_met` judges."""
    goodput_per_s: float | None
    """Sequences a second that met all their limits."""
    arrivals_per_s: float
    finished_per_s: float
    refused_per_s: float
    failed_per_s: float
    refused_by: dict[str, float]
    """Requests a second by the reason of `ridgeline_rejected_total`."""


class HistoryMark(msgspec.Struct, frozen=True):
    """Something that happened, on the lines of history."""

    s_ago: float
    text: str


class History(msgspec.Struct, frozen=True):
    """The last quarter of an hour, oldest first; after the first event of a stream, only the newest point."""

    step_s: float
    ttft_p90_s: list[float | None]
    tpot_p90_s: list[float | None]
    itl_p99_s: list[float | None]
    attainment_ratio: list[float | None]
    goodput_per_s: list[float | None]
    arrivals_per_s: list[float | None]
    events: list[HistoryMark]


class Steps(msgspec.Struct, frozen=True):
    """The steps of one kind that a worker's engine ran: its point in the roofline."""

    step: str
    seconds: float
    """Mean time of one."""
    busy_ratio: float
    intensity: float
    flops_per_s: float
    bytes_per_s: float
    """While in such steps."""
    trail: list[tuple[float, float]]
    """Intensity and FLOP/s of the last minutes, oldest first; empty in a large deployment."""


class WorkerNow(msgspec.Struct, frozen=True):
    """One worker."""

    id: str
    state: WorkerState
    state_since_s: float
    host: str
    device: str | None
    busy_ratio: float | None
    prompt_busy_ratio: float | None
    """Share of its time in steps, and in those with prompts."""
    running: int | None
    max_running: int
    waiting: int | None
    kv_used_ratio: float | None
    """KV blocks in use, or promised to sequences that have produced nothing yet."""
    kv_pinned_ratio: float | None
    decode_step_s: float | None
    steps: list[Steps]
    restarts: int
    why: str | None = None
    """Why it is lost, or how one that is away is tried again."""


class SloPoint(msgspec.Struct, frozen=True):
    """Where a decode worker would meet the SLO on TPOT exactly, by its step-time model at the present mean context."""

    batch: int
    intensity: float | None
    flops_per_s: float | None
    """None where steps decode beside prompts: what is counted does not tell their parts apart."""


class PoolNow(msgspec.Struct, frozen=True):
    """One pool; peaks are those of one worker."""

    pool: Pool
    hardware: str | None
    peak_flops_per_s: float | None
    peak_bytes_per_s: float | None
    peaks_source: str | None
    workers_ready: int
    workers_wanted: int
    bound: str | None
    mfu_ratio: float | None
    mbu_ratio: float | None
    busy_ratio: float | None
    prompt_busy_ratio: float | None
    tokens_per_s: float
    """Prompt tokens of a prefill pool, else output tokens."""
    waiting_prompts: int
    wait_s: float | None
    """Mean wait of the prompts that have left the queue within seconds."""
    decode_step_s: float | None
    """A decode step, divided by the tokens that a sequence gets of it: more than one with speculation."""
    mixed_step_s: float | None
    kv_blocks: int
    slo_point: SloPoint | None
    alone_step_s: float | None
    """What a token of one sequence alone takes, by the step-time model."""
    workers: list[WorkerNow]
    prefix_hit_ratio: float | None = None


class LinkNow(msgspec.Struct, frozen=True):
    """The KV transfers of one transport."""

    transport: str
    why: str
    bytes_per_s: float
    use_ratio: float | None
    """Transfers under way at a decode worker, on average; None if all began during prefill, which nobody times."""
    handoffs_per_s: float
    waiting: int
    """Hand-offs that are offered and not released."""
    mean_wait_s: float | None
    """From asking for KV to its first byte, over all transports."""
    overlapped_ratio: float | None
    failed_per_s: float
    expired_per_s: float
    fastest_bytes_per_s: float | None = None
    """Of one hand-off, since the start."""


class RouterNow(msgspec.Struct, frozen=True):
    """The router that answers."""

    cpu_ratio: float
    """CPU seconds of this process a second."""
    tokens_per_event: float | None
    loop_lag_s: float
    in_flight: int


class Flow(msgspec.Struct, frozen=True):
    """Rates along the way of a request, beside those of `Promise`."""

    prompt_tokens_per_s: float
    split_ratio: float | None
    """Share of the sequences that were prefilled on one worker and decoded on another."""
    kv_bytes_per_s: float
    output_tokens_per_s: float


class StageNow(msgspec.Struct, frozen=True):
    """A part of a request's latency."""

    stage: str
    """See `ridgeline.router.observe.timeline.StageName`."""
    leg: str
    """router, prefill or decode."""
    start_s: float
    """From its arrival."""
    seconds: float


class HandoffNow(msgspec.Struct, frozen=True):
    """How a request's KV went to its decode worker."""

    transport: str
    bytes: int
    overlapped: bool
    """Fetched during prefill; then `wire_s` is that of the last segment."""
    wait_s: float
    wire_s: float
    bytes_per_s: float | None


class RequestNow(msgspec.Struct, frozen=True):
    """A sequence that has ended: `ridgeline.router.observe.ended_requests.EndedRequest`, as the page needs it."""

    id: str
    outcome: str
    prompt_tokens: int
    output_tokens: int
    prefill_worker: str
    decode_worker: str
    """The same if one worker did both."""
    arrived_s_ago: float
    ended_s_ago: float
    ttft_s: float | None
    tpot_s: float | None
    ttft_ok: bool | None
    tpot_ok: bool | None
    """Whether it met its limit; None without one."""
    stages: list[StageNow]
    retries: int
    handoff: HandoffNow | None
    decision: ChosenWorkers | None


class OperationNow(msgspec.Struct, frozen=True):
    """What an operator has begun."""

    running: bool
    text: str


class PageState(msgspec.Struct, frozen=True):
    """All of it."""

    schema: str
    time_unix_s: float
    period_s: float
    window_s: float
    deployment: DeploymentNow
    verdict: Verdict
    resources: list[ResourceUse]
    promise: Promise
    history: History | None
    pools: list[PoolNow]
    links: list[LinkNow]
    router: RouterNow
    flow: Flow
    requests: list[RequestNow] | None
    """The latest ones, those that missed an SLO first."""
    requests_shown_of: int | None
    requests_of: str | None
    """Whose requests these are, if there are several routers."""
    operations: list[OperationNow]
