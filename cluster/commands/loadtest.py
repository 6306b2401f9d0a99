"""`ridgeline compare`: builds the plan, starts what must be started."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from rich.console import Console

from ridgeline.cluster.commands.setup import setup_of, versions
from ridgeline.cluster.config.api_keys import first_admin_key
from ridgeline.cluster.config.autoscale import AutoscaleConfig
from ridgeline.cluster.config.grid import CandidateConfig, CandidateConfigs, both_variants, candidate_of
from ridgeline.cluster.config.models import PoolConfig, RidgelineConfig
from ridgeline.cluster.doctor.checks import refuse_unfit_machine
from ridgeline.cluster.errors import Unfit
from ridgeline.contracts.section import MIB
from ridgeline.contracts.vocabulary import Mode
from ridgeline.loadtest.baseline import BaselineVariant, baseline_of
from ridgeline.loadtest.compare import Comparison, compare, resume
from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.find_rate import FoundRates, find_rate, resume_rates
from ridgeline.loadtest.plan import COLOCATED, DISAGGREGATED, ComparePlan
from ridgeline.loadtest.run.calibration import Workers
from ridgeline.loadtest.run.machine import busy_note
from ridgeline.loadtest.run.replay import check_client
from ridgeline.loadtest.run.unloaded import sizes_of
from ridgeline.loadtest.run_folder import Past, RunFolder
from ridgeline.loadtest.statistics.outcome import Side
from ridgeline.loadtest.trace.shape import fit_context
from ridgeline.loadtest.trace.windows import PairTraces
from ridgeline.loadtest.tuning import Candidate, Candidates
from ridgeline.loadtest.variants import Deployments, Devices, SwitchedVariant, Variant


async def resume_command(folder: Path, given: ComparePlan, config: RidgelineConfig | None, console: Console) -> None:
    """Go on with the interrupted comparison in `folder`; without a configuration, with its own.

    Raises LoadTestError also if what is given now is not what was given first.
    """
    past = RunFolder(folder).past()
    saved = past.settled.setup.get("configuration")
    if saved is None:
        raise LoadTestError(f"{folder} does not say with which configuration it began: begin anew with --out")
    setup = setup_of(config) if config else {"configuration": saved, "versions": versions()}
    past.refuse_another(given.model_dump(mode="json", exclude_unset=True), setup)
    same = RidgelineConfig.model_validate(saved)
    await compare_command(same, past.settled.settled_plan(), folder, console, past, chosen_before(past, same))


async def compare_command(
    config: RidgelineConfig,
    plan: ComparePlan,
    out: Path,
    console: Console,
    past: Past | None = None,
    grid: CandidateConfigs | None = None,
) -> None:
    """Run all variants on the same cores, in pairs, and write what was found; with `past`, go on with it.

    With a `grid` the best candidate of each mode is found first; each deployment then serves one mode only.
    Raises LoadTestError and `serve`'s.
    """
    from ridgeline.cluster.runtime.ray_start import ray_runtime  # here, since the client part has no Ray

    began_s = time.monotonic()
    await asyncio.to_thread(check_client, plan)  # what is wrong with the plan is told before anything starts
    fit_context(sizes_of(plan.of_search() if plan.find_rate else plan), config.model.max_model_len_tokens)
    if grid is not None and not plan.measures_first:
        PairTraces(plan, config.model.max_model_len_tokens)
    _refuse_unfit(config, plan, grid)
    notes = await _notes_of_other_work(config, console)
    baseline, notes_of_baseline = await _checked_baseline(config, plan)
    notes = (*notes, *notes_of_baseline)
    async with ray_runtime(config) as ray_messages:
        console.print(f"what Ray itself says goes to {ray_messages}", style="dim", highlight=False, markup=False)
        first = config if grid is None else both_variants(grid[COLOCATED][0], grid[DISAGGREGATED][0])
        workers = split_workers(first) if plan.modes[:2] == (COLOCATED, DISAGGREGATED) else None
        async with Deployments(partial(_serving, config, console)) as deployments:
            candidates: Candidates | None = None
            variants: tuple[Variant, ...]
            if grid is not None:
                candidates = _candidates(deployments, grid, plan.modes, console)
                variants = candidates["a"][0].variant, candidates["b"][0].variant
            else:
                url, variants = await _variants(deployments, config, plan.modes, console)
                if baseline is not None:
                    notes = (*notes, *await baseline.same_model(url, plan))
                    variants = (*variants, baseline)
            is_alone = config.ray.address is None
            found: FoundRates | Comparison
            if past is not None:
                go_on = partial(resume_rates, variants) if plan.find_rate else partial(resume, _two(variants))
                found = await go_on(past, console, is_alone=is_alone, began_s=began_s)
            else:
                folder = RunFolder(out, await asyncio.to_thread(setup_of, config))
                find = (
                    partial(find_rate, variants) if plan.find_rate else partial(compare, candidates or _two(variants))
                )
                found = await find(
                    plan, folder, console, workers=workers, notes=notes, is_alone=is_alone, began_s=began_s
                )
    out = found.report.parent
    console.print(
        f"wrote {out}/summary.json, {out}/records.jsonl, {out}/records.parquet and {found.report}", markup=False
    )


@asynccontextmanager
async def _serving(config: RidgelineConfig, console: Console, mode: Mode) -> AsyncIterator[str]:
    """Run the deployment in this mode, and yield its URL."""
    from ridgeline.cluster.commands.serve import say_with_time, started

    name = f"compare-{os.getpid()}-{secrets.token_hex(2)}"  # on a joined cluster there may be others
    fixed = {"mode": mode, "name": name, "autoscale": AutoscaleConfig()}
    async with started(config.model_copy(update=fixed), console) as deployment:
        watching = asyncio.create_task(deployment.watch(partial(say_with_time, console)))
        try:
            yield deployment.url
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            if not watching.cancelled():
                watching.result()  # raises why the deployment ended, of which requests only saw the effects


def _refuse_unfit(config: RidgelineConfig, plan: ComparePlan, grid: CandidateConfigs | None) -> None:
    """Raise Unfit, which names the candidate if there are any, before anything starts."""
    if grid is None:
        for mode in plan.modes:
            refuse_unfit_machine(config.model_copy(update={"mode": mode}))
        return
    for each in (candidate for mode in plan.modes for candidate in grid[mode]):
        try:
            refuse_unfit_machine(each.config)
        except Unfit as error:
            raise Unfit(*(f"{each.title}: {sentence}" for sentence in error.sentences)) from error


def _candidates(
    deployments: Deployments, grid: CandidateConfigs, modes: tuple[Mode, ...], console: Console
) -> Candidates:
    """Return a variant for each candidate, which is started when it has its turn."""

    def of(each: CandidateConfig) -> Candidate:
        serve = partial(_serving, each.config, console)
        return Candidate(
            each.name, deployments.variant(each.mode, devices_of(each.config, each.mode), serve), each.overrides
        )

    sides: tuple[Side, Side] = ("a", "b")
    return {side: [of(each) for each in grid[mode]] for side, mode in zip(sides, modes, strict=True)}


def chosen_before(past: Past, config: RidgelineConfig) -> CandidateConfigs | None:
    """Return the candidates that an interrupted comparison had chosen; None if it had no grid."""
    if past.settled.tuning is None:
        return None
    chosen = [each for each in past.settled.tuning["candidates"] if each["chosen"]]
    return {
        each["label"]: (candidate_of(config, each["label"], each["candidate"], each["overrides"]),) for each in chosen
    }


async def _checked_baseline(
    config: RidgelineConfig, plan: ComparePlan
) -> tuple[BaselineVariant | None, tuple[str, ...]]:
    """Check the plan's baseline, if there is one, before anything starts; return it with what must be said of it."""
    if plan.baseline is None:
        return None, ()
    baseline = baseline_of(plan, devices_of(config, plan.modes[0]))
    return baseline, await baseline.check(plan, config.model.max_model_len_tokens)


async def _variants(
    deployments: Deployments, config: RidgelineConfig, modes: tuple[Mode, ...], console: Console
) -> tuple[str, tuple[Variant, ...]]:
    """Start variant a, and switch the modes of its deployment if it can serve both; else each variant needs starts.

    Return its URL and our variants.
    """
    restarted = tuple(deployments.variant(mode, devices_of(config, mode)) for mode in modes)
    url, keys_file = await deployments.start(restarted[0]), config.security.admin_keys_file
    if len(modes) == 1:
        return url, restarted
    headers = {"authorization": f"Bearer {first_admin_key(keys_file)}"} if keys_file else {}
    switched = tuple(SwitchedVariant(url, mode, headers, devices=devices_of(config, mode)) for mode in modes)
    for variant in switched:
        if (why_not := await variant.obstacle()) is not None:
            console.print(
                f"variants need a start each, {variant.mode} cannot be switched to: {why_not}",
                highlight=False,
                markup=False,
            )
            return url, restarted
    return url, switched


def _two(variants: tuple[Variant, ...]) -> tuple[Variant, Variant]:
    """Return the variants of a comparison, of which the plan allows two."""
    a, b = variants
    return a, b


async def _notes_of_other_work(config: RidgelineConfig, console: Console) -> tuple[str, ...]:
    """Look for other work before any of ours begins; only on this machine, a cluster's nodes are not seen from here."""
    note = await asyncio.to_thread(busy_note) if config.ray.address is None else None
    if note is None:
        return ()
    console.print(f"warning: {note}", style="yellow", markup=False)
    return (note,)


def split_workers(config: RidgelineConfig) -> Workers:
    """Return the workers of the two pools in units of a colocated replica, on which `compare` measures first."""
    pools = config.pools

    def hardware(pool: PoolConfig) -> float:
        return pool.gpus_per_worker or pool.cores_per_worker

    replica = hardware(pools.colocated)
    return Workers(
        prefill=pools.prefill.workers * hardware(pools.prefill) / replica,
        decode=pools.decode.workers * hardware(pools.decode) / replica,
    )


def devices_of(config: RidgelineConfig, mode: Mode) -> Devices:
    """Return the GPUs that the pools of a mode have, or the cores if they have none."""
    pools = config.model_copy(update={"mode": mode}).active_pools().values()
    on_gpus = any(pool.gpus_per_worker for pool in pools)

    def of_worker(pool: PoolConfig) -> int:
        return pool.gpus_per_worker if on_gpus else pool.cores_per_worker

    count = sum(pool.workers * of_worker(pool) for pool in pools)
    by_pool = {str(name): of_worker(pool) for name, pool in config.all_pools().items()}
    return Devices("GPU" if on_gpus else "core", count, by_pool)


def refusals(config: RidgelineConfig, plan: ComparePlan) -> list[str]:
    """Return why this comparison would fail or say nothing, a sentence with its fix each; empty if it would not."""
    found = []
    served = config.model.served_names
    if plan.served_name not in (None, *served):
        found.append(
            f"--served-name {plan.served_name}: this configuration serves {', '.join(served)}: leave it out, or set "
            "model.served_name"
        )
    if config.ray.share_cores:
        found.append(
            "ray.share_cores lets engines take turns on the same cores, so no timing would hold: set it to false and "
            "give the pools no more cores than there are"
        )
    if config.ray.share_gpus:
        found.append(
            "ray.share_gpus lets two engines take turns on one GPU, so no timing would hold: leave it out, with a GPU "
            "for each worker"
        )
    if config.transfer.faults:
        found.append(
            f"transfer.faults ({config.transfer.faults}) makes fetches fail on purpose, which only the disaggregated "
            "mode pays for: leave it out"
        )
    if len(set(plan.modes)) > 1 and (unequal := equal_hardware(config)) is not None:
        found.append(unequal)
    return found


def refusals_of_grid(grid: CandidateConfigs, plan: ComparePlan) -> list[str]:
    """Return `refusals` of any two candidates that may be chosen; each names the candidate and what it stands beside.

    Equal hardware is transitive, so each is held against the other mode's first.
    """
    colocated, disaggregated = grid[COLOCATED], grid[DISAGGREGATED]
    beside = [(each, disaggregated[0]) for each in colocated] + [(colocated[0], each) for each in disaggregated[1:]]
    found = []
    for one, other in beside:
        named, base = (one, other) if other is disaggregated[0] else (other, one)
        sentences = refusals(both_variants(one, other), plan)
        found += [f"{named.title}, beside {base.title}: {sentence}" for sentence in sentences]
    return found


def equal_hardware(config: RidgelineConfig) -> str | None:
    """Return a sentence when the two modes would not have the same cores, GPUs and bytes of KV cache, else None."""
    pools = config.pools
    split = (pools.prefill, pools.decode)
    for unit in ("cores", "gpus"):
        per_worker = f"{unit}_per_worker"
        disaggregated = sum(pool.workers * getattr(pool, per_worker) for pool in split)
        colocated = pools.colocated.workers * getattr(pools.colocated, per_worker)
        if disaggregated != colocated:
            return (
                f"the two modes must run on equal hardware: prefill and decode have {disaggregated} {unit}, colocated "
                f"has {colocated}: change pools.colocated.workers or {per_worker}"
            )
    return _equal_kv_cache(pools.colocated, split)


def _equal_kv_cache(replica: PoolConfig, split: tuple[PoolConfig, ...]) -> str | None:
    """Compare bytes; a cache that takes what the weights leave free has no number before it starts."""
    pools = (replica, *split)
    sized = [pool.kv_cache_bytes for pool in pools if pool.kv_cache_bytes is not None]
    if sized and len(sized) < len(pools):
        return (
            "the two modes must have equal KV caches: kv_cache_bytes is set for some pools and null, which takes all "
            "that is free, for others: set it for pools.prefill, pools.decode and pools.colocated, or for none of them"
        )
    disaggregated = sum(pool.workers * (pool.kv_cache_bytes or 0) for pool in split)
    colocated = replica.workers * (replica.kv_cache_bytes or 0)
    if disaggregated != colocated:
        return (
            f"the two modes must have equal KV caches: prefill and decode have {disaggregated / MIB:,.0f} MiB "
            f"together, colocated has {colocated / MIB:,.0f} MiB: change kv_cache_bytes of a pool"
        )
    return None
