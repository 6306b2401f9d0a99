"""Operates a running deployment: changes its mode, gives it more workers and fewer, again and again, restarts all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Final

import httpx

from tests.engines.harness import Metrics

POLL_S: Final = 0.25
CHANGED_WITHIN_S: Final = 60.0
"""Time for a change of mode, which waits for the longest running step."""
CARRIED_OUT_WITHIN_S: Final = 300.0
"""Time for an operation: a worker loads its engine beside a load that leaves it little of the cores."""
DRAINED_WITHIN_S: Final = 60.0
"""Time that requests on a leaving worker get; all of ours are shorter."""


@dataclass
class ModeChanges:
    """The changes so far, and what went wrong with them."""

    took_s: list[float] = field(default_factory=list)
    rerouted_prompts: int = 0
    violations: list[str] = field(default_factory=list)

    async def run(self, http: httpx.AsyncClient, every_s: float, say: Callable[[str], None]) -> None:
        """Change between both modes every so many seconds, until cancelled; 0: never."""
        if not every_s:
            return
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


@dataclass
class Operations:
    """The operations so far, and what went wrong with them."""

    grew_s: list[float] = field(default_factory=list)
    """From each operation for one worker more until it was carried out."""
    served_s: list[float] = field(default_factory=list)
    """From the same moments until the new worker had made a token."""
    shrank_s: list[float] = field(default_factory=list)
    restarted_s: list[float] = field(default_factory=list)
    """Of all workers, one after the other."""
    violations: list[str] = field(default_factory=list)

    async def run(self, http: httpx.AsyncClient, decode: int, times: int, say: Callable[[str], None]) -> None:
        """Have one decode worker more and then one fewer, so many times; then restart every worker; 0: nothing."""
        if not times:
            return
        for _ in range(times):
            before = {worker for worker, _ in await _made(http)}
            async with asyncio.TaskGroup() as both:
                served = both.create_task(self._first_token(http, before))
                grew = both.create_task(self._carried_out(http, "scale", {"workers": {"decode": decode + 1}}))
            self.grew_s.append(grew.result())
            self.served_s.append(served.result())
            self.shrank_s.append(await self._carried_out(http, "scale", {"workers": {"decode": decode}}))
            say(
                f"decode={decode + 1} after {self.grew_s[-1]:.1f} s, its first token after {self.served_s[-1]:.1f} s; "
                f"decode={decode} after {self.shrank_s[-1]:.1f} s"
            )
        self.restarted_s.append(await self._carried_out(http, "restart", {}))
        say(f"all workers restarted after {self.restarted_s[-1]:.1f} s")

    async def _carried_out(self, http: httpx.AsyncClient, kind: str, body: dict[str, Any]) -> float:
        """Give an operation; return the seconds until it was carried out."""
        began_s = time.monotonic()
        given = await http.post(f"/ridgeline/{kind}", json={**body, "timeout_s": DRAINED_WITHIN_S})
        if given.is_error:
            self.violations.append(f"{kind} {body} was refused: {given.status_code} {given.text}")
            return float("nan")
        progress: dict[str, Any] = {}
        while time.monotonic() - began_s < CARRIED_OUT_WITHIN_S:
            progress = (await http.get("/ridgeline/operation")).json()
            if progress.get("operation") != given.json()["operation"]:  # a router that has not been told yet
                progress = {"state": "unknown"}
            if progress["state"] == "done":
                return time.monotonic() - began_s
            if progress["state"] == "failed":
                break
            await asyncio.sleep(POLL_S)
        self.violations.append(f"{kind} {body} was not carried out: {progress}")
        return float("nan")

    async def _first_token(self, http: httpx.AsyncClient, before: set[str]) -> float:
        """Return the seconds until a worker that was not there before has made a token."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < CARRIED_OUT_WITHIN_S:
            if any(tokens for worker, tokens in await _made(http) if worker not in before):
                return time.monotonic() - began_s
            await asyncio.sleep(POLL_S)
        self.violations.append(f"a new worker has made no token within {CARRIED_OUT_WITHIN_S:.0f} s")
        return float("nan")


async def _made(http: httpx.AsyncClient) -> list[tuple[str, float]]:
    """Return each decode worker that there is, with the tokens that it has made."""
    made = Metrics((await http.get("/metrics")).text).by_label("ridgeline_tokens_total", "worker")
    rows = (await http.get("/ridgeline/workers")).json()["workers"]
    return [(row["worker"], made.get(row["worker"], 0.0)) for row in rows if row["pool"] == "decode"]
