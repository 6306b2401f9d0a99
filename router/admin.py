"""What an operator asks of the router: which workers there are, and that one of them leaves. Built into the HTTP app.

Only from this machine, unless the server knows its callers by API keys. Used by `ridgeline drain`.
"""

from __future__ import annotations

import asyncio
import ipaddress
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field

from engine.errors import WorkerLost
from router.fleet import Fleet, Worker

DRAIN_TIMEOUT_S = 30.0


class DrainWish(BaseModel):
    """Body of POST /ridgeline/drain."""

    model_config = ConfigDict(extra="forbid")

    worker: str
    timeout_s: float = Field(default=DRAIN_TIMEOUT_S, ge=0)
    """How long running requests may still take there; then they are cut off."""
    force: bool = False
    """Also if nothing could be served any more."""


def admin_routes(fleet: Fleet, *, callers_are_known: bool = False) -> APIRouter:
    """GET /ridgeline/workers and POST /ridgeline/drain; `callers_are_known`: keys are checked before it comes here."""
    routes = APIRouter(prefix="/ridgeline", dependencies=[] if callers_are_known else [Depends(_from_this_machine)])

    @routes.get("/workers")
    async def workers() -> dict[str, Any]:
        await fleet.refresh()
        return {"workers": [_row(worker) for worker in fleet.workers]}

    one_at_a_time = asyncio.Lock()

    @routes.post("/drain", status_code=HTTPStatus.ACCEPTED)
    async def drain(wish: DrainWish) -> dict[str, Any]:
        async with one_at_a_time:  # else two at once would each see the other's worker staying
            return await _drain(fleet, wish)

    return routes


async def _drain(fleet: Fleet, wish: DrainWish) -> dict[str, Any]:
    worker = _find(fleet, wish.worker)
    if not wish.force and _is_last(fleet, worker):
        raise HTTPException(
            HTTPStatus.CONFLICT,
            f"{wish.worker} is the last {worker.pool} worker, and without it nothing can be served: start another "
            "one, or say --force",
        )
    try:
        await worker.client.drain(wish.timeout_s)
    except WorkerLost as error:
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, f"{wish.worker} does not answer: {error}") from error
    await fleet.refresh()  # from now on nothing new is sent there
    return _row(worker)


def _find(fleet: Fleet, worker_id: str) -> Worker:
    for worker in fleet.workers:
        if worker.worker_id == worker_id:
            return worker
    names = ", ".join(sorted(worker.worker_id for worker in fleet.workers)) or "none"
    raise HTTPException(HTTPStatus.NOT_FOUND, f"there is no worker {worker_id}; there are: {names}")


def _is_last(fleet: Fleet, leaving: Worker) -> bool:
    """Without prefill workers decode computes prompts itself; without the others nothing is left."""
    if leaving.pool == "prefill":
        return False
    staying = (worker for worker in fleet.pool(leaving.pool) if worker is not leaving)
    return not any(_state(worker) == "ready" for worker in staying)


def _state(worker: Worker) -> str:
    if not worker.client.connected or worker.status is None:
        return "lost"
    return "draining" if worker.status.draining else "ready"


def _row(worker: Worker) -> dict[str, Any]:
    status, description = worker.status, worker.description
    return {
        "worker": worker.worker_id,
        "pool": worker.pool,
        "state": _state(worker),
        "incarnation": description.incarnation,
        "host": description.host,
        "pid": description.pid,
        "running": status.running if status else None,
        "tasks": status.tasks if status else None,
        "leases": status.counters.get("open_leases", 0.0) if status else None,
        "stalled_s": round(status.stalled_s, 1) if status else None,
    }


async def _from_this_machine(request: Request) -> None:
    """Neither another machine, nor a page in a browser on this one, which may be anybody's."""
    caller = request.client.host if request.client else ""
    try:
        local = ipaddress.ip_address(caller).is_loopback
    except ValueError:
        local = False
    if not local or "origin" in request.headers:
        raise HTTPException(
            HTTPStatus.FORBIDDEN, "without API keys this is answered to callers on the server's own machine only"
        )
