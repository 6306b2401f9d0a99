"""Changes the mode of a running deployment again and again, as an operator would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from typing import Final

import httpx

CHANGED_WITHIN_S: Final = 60.0
"""A change waits for the longest running step."""


@dataclass
class ModeChanges:
    """The changes so far, and what went wrong with them."""

    took_s: list[float] = field(default_factory=list)
    rerouted_prompts: int = 0
    violations: list[str] = field(default_factory=list)

    async def run(self, http: httpx.AsyncClient, every_s: float, say: Callable[[str], None]) -> None:
        """Change between both modes every so many seconds, until cancelled."""
        for mode in cycle(("colocated", "disaggregated")):
            await asyncio.sleep(every_s)
            began_s = time.monotonic()
            response = await http.post("/ridgeline/mode", json={"mode": mode}, timeout=CHANGED_WITHIN_S)
            took_s = time.monotonic() - began_s
            if response.status_code != httpx.codes.OK:
                self.violations.append(f"the mode did not become {mode}: {response.status_code} {response.text}")
                continue
            rerouted = int(response.json()["rerouted_prompts"])
            self.took_s.append(took_s)
            self.rerouted_prompts += rerouted
            say(f"mode {mode} after {took_s:.2f} s, {rerouted} waiting prompts rerouted")
