"""Names what limits a deployment, in one sentence, from the figures of its pools over a while.

The rule is in docs/concepts.md, "Which resource is short". A full stage makes those before it wait, so it looks from
the end of the pipe to its beginning, at the router first, which is both ends; the first row that holds wins.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Resource = Literal[
    "nothing", "unknown", "router", "kv_blocks", "places", "bandwidth", "compute", "time", "link", "queue"
]
"""What is short. `places` are the sequences that an engine runs at once; `time`: steps fill it, at neither peak."""
Change = Literal[
    "none", "router_processes", "kv_memory", "max_num_seqs", "add_worker", "move_worker", "fewer_workers", "transport"
]
"""What to change; `move_worker` takes it from the pool `giver`, `fewer_workers` says that `giver` needs one less."""

BOUND_FROM = 0.5
"""The share of a peak from which a step counts as bound by it: at that distance from the roof of a roofline
(Williams et al., 2009) nothing else can cost more than the resource itself."""
BUSY_FROM = 0.8
"""The share of its time in steps, or of a link's in transfers, from which it counts as full: `autoscale.up_use`.
Waiting grows as 1 / (1 - use), to five times the service time at 0.8 (M/M/1 queue)."""
SHARING_FROM = BUSY_FROM / (1 - BUSY_FROM)
"""Transfers at a time from which a link that they share counts as full: at a use u there are u / (1 - u) on average
(M/M/1 queue with processor sharing)."""
QUEUED_FROM = 0.62
"""The share of its time in steps from which a queue needs no other cause: one waits on average in an M/M/1 queue, with
Poisson arrivals, at a use of (sqrt(5) - 1) / 2, and with several workers at a higher one."""
IDLE_TO = 0.3
"""The use up to which a pool that decodes can lose a worker: `autoscale.down_use`. Its busy share is no reserve: one
sequence keeps an engine as busy as a full batch does."""
FULL_FROM = 0.95
"""The share of KV blocks or places in use from which there is no room. A guess: a mean that leaves no place for one
sequence of twenty."""
WAITING_FROM = 1.0
"""Prompts that wait on average: from here at least one waits all the time."""
SHARED_FROM = 2.0
"""Sequences in the batch of a worker from which another worker can take one away."""
MIN_ATTAINMENT = 0.9
"""The share of requests that must meet an SLO: `autoscale.min_attainment`, DistServe's goal."""
TOKENS_AN_EVENT = 1.2
"""Tokens in an event of a stream from which the router is late, as it says itself (`router/front/text_turns.py`)."""
EVENTS_PER_S = 100
"""With fewer, tokens come together in an event for another reason than a late router (`router/front/text_turns.py`)."""
ROUTER_CORES = 0.9
"""CPU seconds a second from which a router is full. A guess: its event loop cannot use more than one core."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """Figures of one pool over a while; None is not known. Shares are of 1, levels are means over time."""

    pool: str
    workers: float | None = None
    busy: float | None = None
    """Share of its workers' time that was spent in engine steps."""
    mfu: float | None = None
    mbu: float | None = None
    """Shares of the peaks while in steps."""
    kv_used: float | None = None
    """Share of its KV blocks in use."""
    running: float | None = None
    """Sequences in the batch of one worker."""
    places: float | None = None
    """Sequences that one worker runs at a time, max_num_seqs."""
    waiting: float | None = None
    """Prompts or sequences that wait for the pool, in the router and in its engines."""
    preemptions: float | None = None
    """Sequences that lost their KV blocks to others."""
    slow: bool | None = None
    """Whether its steps take longer than the SLO on TPOT; KV that comes late is another reason for a miss."""
    refused: float | None = None
    """Requests that were refused, since its KV blocks were promised to others."""

    @property
    def title(self) -> str:
        """Its name at the beginning of a sentence."""
        return self.pool.capitalize()

    @property
    def places_used(self) -> float | None:
        """Share of its places in use."""
        return self.running / self.places if self.running is not None and self.places else None


@dataclass(frozen=True, slots=True)
class FleetState:
    """Figures of a deployment over a while; None is not known."""

    pools: tuple[PoolState, ...] = ()
    requests: float | None = None
    """Requests that finished."""
    ttft_attainment: float | None = None
    tpot_attainment: float | None = None
    """Shares of requests that met the SLO; None also without one."""
    link_busy: float | None = None
    """KV transfers under way at a receiving worker, or more exactly: the share of the link's measured peak."""
    handoff_wait_s: float | None = None
    """Mean time from asking for KV to its first byte."""
    wire_s: float | None = None
    """Mean time from the first byte of KV to the last."""
    router_cores: float | None = None
    """CPU seconds a second of the router process."""
    tokens_per_event: float | None = None
    """Tokens in one event of a stream."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What is short, in which pool, and what to change; `sentence` says it."""

    resource: Resource
    sentence: str
    pool: str | None = None
    change: Change = "none"
    giver: str | None = None
    """The pool that can do without a worker."""


def bottleneck(state: FleetState) -> Bottleneck:
    """Return what is short; nothing, or that it cannot be told, if the figures say so."""
    if state.requests == 0:
        return Bottleneck("unknown", "Cannot be told: no request finished.")
    found = next(_rows(state), None)
    if found is not None:
        return found
    missing = _missing(state)
    return Bottleneck("unknown", f"Cannot be told: {missing}.") if missing else _nothing(state)


def bound(mfu: float | None, mbu: float | None) -> str | None:
    """Return what limits steps: being left of the ridge does not make them memory-bound, nearness to the roof does."""
    if mfu is None or mbu is None:
        return None
    if max(mfu, mbu) < BOUND_FROM:
        return "neither"
    return "compute" if mfu >= mbu else "memory"


def _rows(state: FleetState) -> Iterator[Bottleneck]:
    """Yield each row of the rule that holds, in its order."""
    last = [pool for pool in state.pools if pool.pool != "prefill"]
    first = [pool for pool in state.pools if pool.pool == "prefill"]
    yield from _router(state)
    for pool in last:
        yield from _room(pool)
        yield from _steps(pool, state, queued=True)
    yield from _link(state)
    for pool in first:
        yield from _room(pool)
        yield from _steps(pool, state, queued=True)
    for pool in (*last, *first):  # without a queue, it makes no other one wait
        yield from _steps(pool, state, queued=False)
    for pool in (*last, *first):
        yield from _queue(pool)


def _router(state: FleetState) -> Iterator[Bottleneck]:
    late, cores = state.tokens_per_event, state.router_cores
    if not _from(late, TOKENS_AN_EVENT) and not _from(cores, ROUTER_CORES):
        return
    used = "" if cores is None else f"it uses {cores:.0%} of a core"
    behind = f"an event has {late:.1f} tokens instead of 1" if _from(late, TOKENS_AN_EVENT) else ""
    said = f"The router is short of CPU: {' and '.join(filter(None, (used, behind)))}: raise router.processes."
    yield Bottleneck("router", said, change="router_processes")


def _room(pool: PoolState) -> Iterator[Bottleneck]:
    waits = f"{pool.waiting or 0:.0f} wait"
    if _from(pool.preemptions, 1):
        waits = f"{pool.preemptions:.0f} preempted"
    if _from(pool.refused, 1):
        waits = f"{pool.refused:.0f} refused"
    lacks = _from(pool.preemptions, 1) or _from(pool.refused, 1)
    if lacks or (_from(pool.kv_used, FULL_FROM) and _waits(pool)):
        used = "" if pool.kv_used is None else f"{pool.kv_used:.0%} in use, "
        said = f"{pool.title} is short of KV blocks: {used}{waits}: give it more KV memory or one worker more."
        yield Bottleneck("kv_blocks", said, pool.pool, "kv_memory")
    elif _from(pool.places_used, FULL_FROM) and _waits(pool):
        said = f"{pool.title} is short of places: {pool.running:.0f} of {pool.places:.0f} run, {waits}: "
        yield Bottleneck("places", f"{said}raise max_num_seqs.", pool.pool, "max_num_seqs")


def _steps(pool: PoolState, state: FleetState, *, queued: bool) -> Iterator[Bottleneck]:
    missed = _missed(pool, state)
    if _waits(pool) != queued or not (queued or (missed and _is_shared(pool))):
        return
    if not _from(pool.busy, QUEUED_FROM if queued and missed else BUSY_FROM):
        return
    resource: Resource = "time"
    peaks = [(share, of) for share, of in ((pool.mfu, "FLOP/s"), (pool.mbu, "bytes/s")) if share is not None]
    use = "at {:.0%} of peak {}".format(*max(peaks)) if peaks else ""
    if _from(pool.mbu, max(BOUND_FROM, pool.mfu or 0.0)):
        resource = "bandwidth"
        use += "" if pool.running is None else f", batch {pool.running:.0f}"
    elif _from(pool.mfu, BOUND_FROM):
        resource = "compute"
    name = {"time": "workers", "bandwidth": "memory bandwidth", "compute": "FLOP/s"}[resource]
    used = f"busy {pool.busy:.0%} {use}".strip()
    giver = next((other for other in state.pools if other is not pool and _spares_one(other, state)), None)
    change: Change = "add_worker" if giver is None else "move_worker"
    then = f": add one {pool.pool} worker"
    if giver is not None:
        then = f"; {_idles(giver)}: move one {giver.pool} worker to {pool.pool}"
    said = f"{pool.title} is short of {name}: {used}{then}."
    yield Bottleneck(resource, said, pool.pool, change, giver.pool if giver else None)


def _is_shared(pool: PoolState) -> bool:
    """Whether one worker more would make a step shorter: one sequence fills the time of a worker that decodes."""
    return pool.pool == "prefill" or pool.running is None or pool.running >= SHARED_FROM


def _idles(pool: PoolState) -> str:
    return f"{pool.pool} is idle {1 - (pool.busy or 0.0):.0%}"


def _link(state: FleetState) -> Iterator[Bottleneck]:
    wait_s, wire_s = state.handoff_wait_s, state.wire_s
    if not _from(state.link_busy, BUSY_FROM) or wait_s is None or wire_s is None:
        return
    if wait_s > wire_s:
        how = f"busy {state.link_busy:.0%}, and a hand-off waits {_time(wait_s)} for {_time(wire_s)} of "
        how += "transfer"
    elif _from(state.link_busy, SHARING_FROM):
        how = f"{state.link_busy:.0f} transfers share it, and one takes {_time(wire_s)}"
    else:
        return
    said = f"The KV link is short: {how}: use a faster transport, or mode colocated."
    yield Bottleneck("link", said, change="transport")


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1.0 else f"{seconds:.1f} s"


def _queue(pool: PoolState) -> Iterator[Bottleneck]:
    if _waits(pool) and pool.busy is not None and pool.busy < QUEUED_FROM:
        said = (
            f"{pool.title} has a queue of {pool.waiting:.0f} while it is busy {pool.busy:.0%}; check max_num_seqs and "
        )
        yield Bottleneck("queue", f"{said}its KV blocks.", pool.pool)


def _nothing(state: FleetState) -> Bottleneck:
    for name, share in (("TTFT", state.ttft_attainment), ("TPOT", state.tpot_attainment)):
        if share is not None and share < MIN_ATTAINMENT:
            said = f"Only {share:.0%} of requests meet the {name} SLO, and no figure shows which resource is short."
            return Bottleneck("unknown", said)
    giver = next((pool for pool in state.pools if _spares_one(pool, state)), None)
    if giver is not None:
        said = f"Nothing is short; {_idles(giver)}: one {giver.pool} worker fewer would do."
        return Bottleneck("nothing", said, change="fewer_workers", giver=giver.pool)
    nearest = max((each for pool in state.pools for each in _nearness(pool)), default=None)
    return Bottleneck("nothing", f"Nothing is short{'' if nearest is None else f'; nearest: {nearest[1]}'}.")


def _nearness(pool: PoolState) -> Iterator[tuple[float, str]]:
    busy = pool.busy if pool.pool == "prefill" else None  # one sequence fills the time of decode
    for use, limit, name in (
        (busy, BUSY_FROM, "busy"),
        (pool.kv_used, FULL_FROM, "KV blocks in use"),
        (pool.places_used, FULL_FROM, "places in use"),
    ):
        if use is not None:
            yield use / limit, f"{pool.pool}, {name} {use:.0%}"


def _missing(state: FleetState) -> str:
    """Say which figure would be needed to say that nothing is short; empty if none."""
    if not state.pools:
        return "the server publishes no figures of its workers"
    met = all(_from(share, MIN_ATTAINMENT) for share in (state.ttft_attainment, state.tpot_attainment))
    figures: dict[str, Callable[[PoolState], float | None]] = {
        "queue": lambda pool: pool.waiting,
        "KV use": lambda pool: pool.kv_used,
    }
    if not met:  # who meets the SLOs without a queue is short of nothing, however busy
        figures["busy time"] = lambda pool: pool.busy
    for name, figure in figures.items():
        for pool in state.pools:
            if figure(pool) is None:
                return f"{pool.pool} publishes no {name}{_known(pool)}"
    waiting = next((pool for pool in state.pools if _waits(pool) and pool.busy is None), None)
    return "" if waiting is None else f"{waiting.pool} publishes no busy time{_known(waiting)}"


def _known(pool: PoolState) -> str:
    """Say what a pool of which something is missing does publish; empty if nothing."""
    figures = ((pool.waiting, "{:.0f} wait"), (pool.kv_used, "{:.0%} of KV blocks in use"))
    places = ((pool.places_used, "{:.0%} of places"),)
    said = ", ".join(text.format(figure) for figure, text in (*figures, *places) if figure is not None)
    return f"; {said}" if said else ""


def _spares_one(pool: PoolState, state: FleetState) -> bool:
    """Whether the pool would still be short of nothing with one worker fewer."""
    if pool.workers is None or pool.workers < 2 or pool.busy is None or _waits(pool) or _missed(pool, state):
        return False
    more = pool.workers / (pool.workers - 1)
    room = all(use is None or use * more < FULL_FROM for use in (pool.kv_used, pool.places_used))
    # the time of prefill's steps grows with its load; that of decode's hardly does
    return room and (pool.busy * more <= BUSY_FROM if pool.pool == "prefill" else pool.busy <= IDLE_TO)


def _missed(pool: PoolState, state: FleetState) -> bool:
    """Whether an SLO is missed for which the pool answers: TTFT for prefill, TPOT for decode, else both."""
    tpot = {None: state.tpot_attainment, True: 0.0, False: None}[pool.slow]
    shares = {"prefill": (state.ttft_attainment,), "decode": (tpot,)}.get(pool.pool, (state.ttft_attainment, tpot))
    return any(share is not None and share < MIN_ATTAINMENT for share in shares)


def _waits(pool: PoolState) -> bool:
    return _from(pool.waiting, WAITING_FROM)


def _from(figure: float | None, limit: float) -> bool:
    return figure is not None and figure >= limit
