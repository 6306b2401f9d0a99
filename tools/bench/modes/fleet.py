"""The deployment whose mode is switched, and one round of a mode on it."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from rich.console import Console

from ridgeline.cluster.commands.serve import refuse_unfit_machine, say_with_time, started
from ridgeline.cluster.commands.setup import setup_of, versions
from ridgeline.cluster.config.api_keys import first_admin_key
from ridgeline.cluster.config.loader import load_config
from ridgeline.cluster.runtime.ray_start import ray_runtime
from ridgeline.loadtest.errors import LoadTestError, NotDisaggregatedError, RestartedError
from ridgeline.loadtest.plan import DISAGGREGATED, ComparePlan, Mode
from ridgeline.loadtest.run.machine import disturbance, read_cpu
from ridgeline.loadtest.run.records import RecordFile
from ridgeline.loadtest.run.replay import ReplayResult, RoundRequests, run_replay
from ridgeline.loadtest.run.server import Servers, as_servers, first_model, with_slo_headers
from ridgeline.loadtest.run.unloaded import Unloaded, measure_unloaded
from ridgeline.loadtest.run.validity import discard_reasons
from ridgeline.loadtest.run.warm_up import warm_up_workers
from ridgeline.loadtest.run_folder import RECORDS
from ridgeline.loadtest.trace.readers import load_trace
from ridgeline.loadtest.trace.trace import Trace
from ridgeline.loadtest.valid_rounds import require_disaggregated
from ridgeline.loadtest.variants import SwitchedVariant
from tools.bench.modes.journal import Clock, Journal, Limits, Outcome, RoundEnded, RoundSpec, outcome_of
from tools.bench.modes.settings import Settings

T = TypeVar("T")
ORDINALS_PER_ROUND: Final = 512
"""Prompts set apart for each round and each warm-up, so that no two share a prompt's beginning."""
MEASURING_PROMPTS: Final = 1024


@dataclass(slots=True)
class Fleet:
    """A running deployment. Prompts are counted here, so that every one is new to its prefix caches."""

    url: str
    folder: Path
    setup: Mapping[str, Any]
    max_model_tokens: int | None
    is_alone: bool
    """Whether other work on this machine counts as a disturbance: the deployment is this process's."""
    admin: dict[str, str] = field(default_factory=dict)
    next_ordinal: int = 0
    quiet: Console = field(default_factory=lambda: Console(quiet=True))

    async def check(self, variants: tuple[str, ...]) -> None:
        """Raise LoadTestError for a mode that this deployment cannot serve."""
        for variant in variants:
            obstacle = await self._variant(variant).obstacle()
            if obstacle is not None:
                raise LoadTestError(
                    f"this deployment cannot serve {variant} ({obstacle}): leave it out with --variants"
                )

    async def measure(self, variant: str, plan: ComparePlan) -> Unloaded:
        """Measure what the idle server takes for the plan's requests in this mode."""
        await self._variant(variant).ready()
        per_round = len(load_trace(plan.trace).rows) + plan.warmup_requests
        index = math.ceil(self.next_ordinal / per_round)
        self.next_ordinal = (index + 1) * per_round + MEASURING_PROMPTS
        return await measure_unloaded(self.url, plan, self.quiet, round_index=index)

    async def warm_up(self, variant: str, trace: Trace, plan: ComparePlan) -> None:
        """Let every worker make steps at the trace's sizes in this mode."""
        await self._variant(variant).ready()
        requests = RoundRequests(trace, ORDINALS_PER_ROUND)
        await warm_up_workers(self.url, plan, requests, self._new_round_index(), self.quiet)

    async def round(
        self, spec: RoundSpec, trace: Trace, plan: ComparePlan, limits: Limits | None, journal: Journal, clock: Clock
    ) -> RoundEnded:
        """Replay the trace in a mode, which is told the limits if there are any, and write down how it ended.

        The plan's limits judge lateness. It ends when every request has ended or was given up. Raises LoadTestError if
        the server cannot be reached.
        """
        await self._variant(spec.variant).ready()
        number = journal.next_number
        labels: dict[str, str | int] = {"round": number, "workload": spec.workload, "block": spec.block}
        if limits is not None:
            labels |= {"ttft_limit_ms": f"{limits.ttft_ms:g}", "tpot_limit_ms": f"{limits.tpot_ms:g}"}
        servers = as_servers(self.url) if limits is None else with_slo_headers(self.url, limits.ttft_ms, limits.tpot_ms)
        began, began_s = datetime.now(UTC), time.monotonic()
        before = await asyncio.to_thread(read_cpu)
        outcomes: tuple[Outcome, ...] = ()
        disturbed: tuple[str, ...] = ()
        try:
            replayed = await run_replay(
                servers,
                plan.of_warm_round(),
                self.quiet,
                round_index=self._new_round_index(),
                requests=RoundRequests(trace, ORDINALS_PER_ROUND),
                record_file=RecordFile(self.folder / RECORDS, variant=spec.variant, **labels),
            )
        except RestartedError as error:
            void: str | None = str(error)
        else:
            others = disturbance(before, await asyncio.to_thread(read_cpu)) if self.is_alone else None
            disturbed = (*discard_reasons(replayed, others, plan.slos), *_not_disaggregated(spec.variant, replayed))
            outcomes, void = tuple(outcome_of(record) for record in replayed.records), replayed.fleet_change
        took_s = time.monotonic() - began_s
        ended = RoundEnded(
            number, spec, began, took_s, outcomes, disturbed, void, clock.spent_s, next_ordinal=self.next_ordinal
        )
        journal.add(ended)
        return ended

    def _variant(self, mode: str) -> SwitchedVariant:
        return SwitchedVariant(self.url, cast(Mode, mode), dict(self.admin))

    def _new_round_index(self) -> int:
        index = math.ceil(self.next_ordinal / ORDINALS_PER_ROUND)
        self.next_ordinal = (index + 1) * ORDINALS_PER_ROUND
        return index


def shuffled(items: Sequence[T], seed: str) -> list[T]:
    """Return the items in an order drawn from the seed."""
    order = list(items)
    random.Random(seed).shuffle(order)
    return order


def round_plan(plan: ComparePlan, tightest: Limits, deadline_s: float) -> ComparePlan:
    """Return the plan of a round: a late client is judged by the tightest limits, and requests are given up in time."""
    limits = {"slo_ttft_ms": tightest.ttft_ms, "slo_tpot_ms": tightest.tpot_ms}
    return plan.model_copy(update=limits | {"deadline_s": deadline_s})


def hopeless_after_s(loosest: Limits, longest_output_tokens: int) -> float:
    """Return the seconds after which a request can meet no cell's limits any more."""
    return (loosest.ttft_ms + loosest.tpot_ms * longest_output_tokens) / 1e3


def _not_disaggregated(variant: str, replayed: ReplayResult) -> tuple[str, ...]:
    if variant != DISAGGREGATED or not any(record.ok for record in replayed.records):
        return ()
    try:
        require_disaggregated(replayed)
    except NotDisaggregatedError as error:
        return (str(error),)
    return ()


@asynccontextmanager
async def running(settings: Settings, folder: Path, console: Console) -> AsyncIterator[Fleet]:
    """Start a deployment, or take the one that the settings name. Raises LoadTestError and `serve`'s errors."""
    if settings.url is not None:
        yield await _fleet(settings.url, folder, {"url": settings.url, "versions": versions()}, is_alone=False)
        return
    overrides = {"server.port": "0", "mode": settings.pure_variants[0]} | settings.overrides
    config = load_config(settings.config, overrides).config
    await asyncio.to_thread(refuse_unfit_machine, config)
    keys_file = config.security.admin_keys_file
    async with ray_runtime(config), started(config, console) as deployment:
        watching = asyncio.create_task(deployment.watch(partial(say_with_time, console)))
        try:
            fleet = await _fleet(deployment.url, folder, await asyncio.to_thread(setup_of, config), is_alone=True)
            fleet.admin = {"authorization": f"Bearer {first_admin_key(keys_file)}"} if keys_file else {}
            yield fleet
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            if not watching.cancelled():
                watching.result()  # raises why the deployment ended, of which requests only saw the effects


async def _fleet(url: str, folder: Path, setup: Mapping[str, Any], *, is_alone: bool) -> Fleet:
    async with Servers((url,)).open_first() as http:
        card = await first_model(http)
    return Fleet(url.rstrip("/"), folder, setup, card.max_model_len, is_alone)
