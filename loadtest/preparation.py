"""What a comparison settles before its first round: rate, SLOs, the requests of each pair, what fits the budget.

What the plan leaves to be measured is measured once, at variant a's server, and holds for both variants and all rounds.
"""

import time

import msgspec
from rich.console import Console

from ridgeline.loadtest.errors import ServerError
from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.run.calibration import (
    PLANNED_PAIRS,
    Schedule,
    Workers,
    beside_arrivals_s,
    fit_budget,
    given_load,
    least_requests,
    power_note,
    settle,
    workers_of,
)
from ridgeline.loadtest.run.quantities import minutes_text
from ridgeline.loadtest.run.server import Servers, as_servers, served_model
from ridgeline.loadtest.run.unloaded import Unloaded, measure_unloaded, sizes_of
from ridgeline.loadtest.run.warm_up import MOST_REQUESTS, MOST_WAVES
from ridgeline.loadtest.run_folder import Settled
from ridgeline.loadtest.trace.windows import PairTraces
from ridgeline.loadtest.variants import Variant

STARTS_IN_A_PAIR = 1.5
"""Mean starts in a pair, if each variant needs one: every second pair begins with the one that is running."""


GIVEN_UP_AFTER = 2.0
"""A request is given up after this many times the time that the longest one has within its SLOs."""


def _workers(unloaded: Unloaded, servers: Servers) -> Workers:
    """Return the workers that a server publishes; engines that publish none are a replica each."""
    return workers_of(unloaded.workers) if unloaded.workers else Workers(replicas=len(servers.engines or servers.urls))


async def prepare(
    variant: Variant,
    given: ComparePlan,
    console: Console,
    workers: Workers | None,
    notes: tuple[str, ...],
    began_s: float,
    context_tokens: int | None = None,
) -> Settled:
    """Reach variant a, measure it if the plan asks for it, and settle rate, SLOs and what fits the budget.

    `notes`, which the caller has printed, are kept before those on the load.
    No request is longer than `context_tokens`, of which some variants may have less than variant a.
    Raises LoadTestError.
    """
    plan = given.with_rate()
    if plan.budget_s is not None:
        console.print(f"this comparison takes about {minutes_text(plan.budget_s)}", highlight=False)
    reached = await variant.ready()
    servers = as_servers(reached.server)
    async with servers.open_first() as http:
        card = await served_model(http, servers, plan)
    context_tokens = min((each for each in (card.max_model_len, context_tokens) if each), default=None)
    trace = sizes_of(plan)
    load = given_load(plan, trace)
    measured_prompts = 0
    if plan.measures_first:
        unloaded = await measure_unloaded(servers, plan, console, round_index=0)
        measured_prompts = len(trace.rows) + 1024
        plan, load = settle(plan, trace, unloaded, workers or _workers(unloaded, servers))
        beside_s = beside_arrivals_s(plan, trace, unloaded)
        schedule = Schedule(STARTS_IN_A_PAIR, variant.start_s, beside_s, rounds=len(plan.kinds))
        requests = PairTraces(plan, context_tokens, card.least_prompt_tokens).requests
        spent_s = time.monotonic() - began_s
        if load.rate:
            least = least_requests(load.rate, trace, unloaded, plan.slos)
            plan, load = fit_budget(plan, load, requests, schedule, spent_s, least)
    if load.rate is None:
        raise ServerError("all requests of this trace arrive at once, so there is no rate to start from: give --rate")
    traces = PairTraces(plan, context_tokens, card.least_prompt_tokens)
    if not plan.measures_first:
        power = power_note(plan.most_pairs, traces.requests, len(plan.kinds), f"--pairs {PLANNED_PAIRS}")
        load = msgspec.structs.replace(load, notes=(power,))
    load = msgspec.structs.replace(load, notes=(*load.notes, traces.note, *card.notes))
    most = traces.prefix_ids + 1 + max(traces.most_requests, traces.most_at_a_rate)
    ordinals = most + MOST_WAVES * MOST_REQUESTS
    for sentence in load.sentences(plan.slos):
        console.print(sentence, highlight=False, markup=False)
    load = msgspec.structs.replace(load, notes=(*notes, *load.notes))
    plan = plan.model_copy(update={"deadline_s": bounded_deadline_s(plan, traces, console)})
    return Settled(
        given=given.model_dump(mode="json", exclude_unset=True),
        plan=plan.model_dump(mode="json"),
        load=load,
        setup={},
        max_model_tokens=context_tokens,
        least_prompt_tokens=card.least_prompt_tokens,
        ordinals_per_round=ordinals,
        first_round_index=1 + (traces.prefix_ids + measured_prompts) // ordinals,
    )


def bounded_deadline_s(plan: ComparePlan, traces: PairTraces, console: Console) -> float:
    """Return the plan's deadline, or less if no request within its SLOs could take so long; print it."""
    ttft_s, tpot_s, _ = plan.slos.in_seconds()
    longest_s = ttft_s + tpot_s * traces.longest_output_tokens
    deadline_s = min(plan.deadline_s, GIVEN_UP_AFTER * longest_s)
    console.print(f"a request is given up after {deadline_s:.3g} s", highlight=False)
    if longest_s > deadline_s:
        note = (
            f"the longest answer may take {longest_s:.3g} s within the SLOs: give --deadline-s, or it counts as missed"
        )
        console.print(f"warning: {note}", style="yellow", highlight=False)
    return deadline_s
