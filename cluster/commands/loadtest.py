"""`ridgeline compare` checks running servers and starts what must be started; `report` shows a comparison again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from ridgeline.cluster.commands.setup import setup_of, versions
from ridgeline.loadtest.compare import compare, refuse_unequal, resume
from ridgeline.loadtest.export import ExportFormat, export_rounds
from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.run.calibration import Workers
from ridgeline.loadtest.run.machine import busy_note
from ridgeline.loadtest.run.quantities import counted
from ridgeline.loadtest.run.replay import check_client
from ridgeline.loadtest.run.server import ModelCard, first_model, open_http
from ridgeline.loadtest.run.unloaded import sizes_of
from ridgeline.loadtest.run_folder import Past, RunFolder, make_folder
from ridgeline.loadtest.running_server import note_models, running_servers
from ridgeline.loadtest.saved import report_again
from ridgeline.loadtest.trace.shape import fit_context
from ridgeline.loadtest.variants import Variant

if TYPE_CHECKING:  # of the serving part, which a client does not have
    from ridgeline.cluster.config.models import RidgelineConfig


async def resume_command(folder: Path, given: ComparePlan, config: RidgelineConfig | None, console: Console) -> None:
    """Go on with the interrupted comparison in `folder`; without a configuration, with its own.

    Raises LoadTestError also if what is given now is not what was given first.
    """
    past = RunFolder(folder).past()
    saved = past.settled.setup.get("configuration")
    setup = setup_of(config) if config else {"configuration": saved, "versions": versions()}
    past.refuse_another(given.model_dump(mode="json", exclude_unset=True), setup)
    plan, same = past.settled.settled_plan(), None
    if plan.modes:
        from ridgeline.cluster.config.models import RidgelineConfig

        same = RidgelineConfig.model_validate(saved)
    await compare_command(same, plan, folder, console, past)


async def compare_command(
    config: RidgelineConfig | None, plan: ComparePlan, out: Path, console: Console, past: Past | None = None
) -> dict[str, Any]:
    """Run all variants in pairs of rounds, and write what was found, which is returned; with `past`, go on with it.

    `config` is that of an own deployment, if the plan has modes. Raises LoadTestError and `serve`'s.
    """
    began_s = time.monotonic()
    await asyncio.to_thread(check_client, plan)  # what is wrong with the plan is told before anything starts
    sizes = sizes_of(plan.with_rate())
    if config is not None:
        fit_context(sizes, config.model.max_model_len)
    is_alone = config is None or config.ray.address is None
    notes = await _notes_of_other_work(console) if is_alone else ()
    planned, unit, workers = _known_before(config, plan)
    servers = running_servers(plan, unit)
    for server in servers:
        notes = (*notes, *_say(await server.check(plan), console))
    refuse_unequal((*planned, *servers), plan)
    make_folder(out)
    cards = {server.mode: server.card for server in servers if server.card is not None}
    async with _own(config, plan, console) as (own, card):
        if card is not None:
            cards = {plan.modes[0]: card} | cards
        notes = (*notes, *_say(note_models(cards), console))
        if plan.tokenizer is None and not plan.sends_text:  # all variants get the same tokens
            root = next((each.root for each in cards.values() if each.root), None)
            plan = plan.model_copy(update={"tokenizer": root}) if servers else plan
        variants = (*own, *servers)
        if past is not None:
            found = await resume(variants, past, console, is_alone=is_alone, began_s=began_s)
        else:
            setup = {"configuration": None, "versions": versions()} if config is None else setup_of(config)
            found = await compare(
                variants,
                plan,
                RunFolder(out, setup),
                console,
                workers=workers,
                notes=notes,
                is_alone=is_alone,
                began_s=began_s,
            )
    out = found.report.parent
    console.print(
        f"wrote {out}/summary.json, {out}/records.jsonl, {out}/records.parquet and {found.report}", markup=False
    )
    return found.summary


def report_command(folder: Path, console: Console, export: ExportFormat | None = None) -> None:
    """Write report.html of a run again, or its rounds for export. Raises LoadTestError."""
    if export is None:
        console.print(f"wrote {report_again(folder, console)}", highlight=False, markup=False)
        return
    paths = export_rounds(folder, export)
    console.print(
        f"wrote the valid rounds to {counted(len(paths), 'file')} in {folder / export}", highlight=False, markup=False
    )


@asynccontextmanager
async def _own(
    config: RidgelineConfig | None, plan: ComparePlan, console: Console
) -> AsyncIterator[tuple[tuple[Variant, ...], ModelCard | None]]:
    """Start the plan's own deployment; yield its variants with what it says of its model."""
    if config is None:
        yield (), None
        return
    from ridgeline.cluster.commands.own_variants import own_variants

    async with own_variants(config, plan.modes, console) as (url, variants), open_http(url) as http:
        console.print(f"watch it at {url}/", highlight=False, markup=False)
        yield variants, await first_model(http, plan.served_model_name)


def _known_before(
    config: RidgelineConfig | None, plan: ComparePlan
) -> tuple[tuple[Variant, ...], Literal["core", "GPU"], Workers | None]:
    """Return an own deployment's variants, what they run on, and the workers of its two pools, before it starts.

    A fair comparison gives running servers the same kind of devices.
    """
    if config is None:
        return (), "GPU", None
    from ridgeline.cluster.commands.own_variants import devices_of, planned_variants, split_workers

    unit = devices_of(config, plan.modes[0]).unit
    return planned_variants(config, plan.modes), unit, split_workers(config, plan.modes)


def _say(notes: tuple[str, ...], console: Console) -> tuple[str, ...]:
    for note in notes:
        console.print(note, highlight=False, markup=False)
    return notes


async def _notes_of_other_work(console: Console) -> tuple[str, ...]:
    """Look for other work before any of ours begins; only on this machine, a cluster's nodes are not seen from here."""
    note = await asyncio.to_thread(busy_note)
    if note is None:
        return ()
    console.print(f"warning: {note}", style="yellow", markup=False)
    return (note,)
