"""`ridgeline mode`: tells in which mode a server serves, or changes it while it serves."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console

from ridgeline.cluster.commands.operators.client import ask, operator_client
from ridgeline.contracts.vocabulary import Mode

PATH = "/ridgeline/mode"
CHANGE_WITHIN_S = 90.0
"""More than a server takes for a change while another one is under way: with several routers a minute
(`ridgeline.router.decisions`), of which each change is half."""


class _Now(msgspec.Struct, frozen=True):
    mode: Mode
    modes: list[Mode]
    why_not: dict[Mode, str]


class _Change(msgspec.Struct, frozen=True):
    rerouted_prompts: int
    took_s: float


async def mode(url: str, wanted: Mode | None, *, admin_key_file: Path | None, console: Console) -> None:
    """Print the mode, or change it and say how long that took. Raises ServerError when the server refuses."""
    async with operator_client(url, admin_key_file) as client:
        now = await ask(client, "GET", PATH, _Now)
        if wanted is None:
            console.print(f"the server serves {now.mode}", highlight=False)
            for other in now.modes:
                if other != now.mode:
                    console.print(f"it can change to {other} while it serves: ridgeline mode {other}", highlight=False)
            for other, why in now.why_not.items():
                console.print(f"it cannot become {other}: {why}", highlight=False, markup=False)
            return
        if wanted == now.mode:
            console.print(f"the server serves {wanted} already", highlight=False)
            return
        console.print(f"changing from {now.mode} to {wanted}", highlight=False)
        change = await ask(client, "POST", PATH, _Change, {"mode": wanted}, within_s=CHANGE_WITHIN_S)
    waiting = change.rerouted_prompts
    console.print(
        f"{now.mode} -> {wanted} in {change.took_s:.2f} s; {waiting} waiting prompt{'s' * (waiting != 1)} "
        "rerouted, what runs goes on where it is",
        highlight=False,
    )
