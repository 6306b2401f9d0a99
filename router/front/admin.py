"""The operator's paths, a part of the HTTP app: workers, drain, mode, adapters, requests, decisions, record, scale.

`ridgeline.router.front.middleware.admin_access` decides who may use them; without its permission nobody may. `ridgeline
drain`, `mode`, `trace`, `decisions`, `record`, `scale` and `restart` are clients.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, HTTPException, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response, StreamingResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest

from ridgeline.contracts.errors import AdapterRefused, WorkerLost
from ridgeline.contracts.section import MIB
from ridgeline.contracts.vocabulary import Mode, Pool
from ridgeline.router.dispatch.modes import Modes
from ridgeline.router.fleet.adapters import Adapters
from ridgeline.router.fleet.fleet import Fleet, Worker
from ridgeline.router.fleet.pairing import PairingRefused
from ridgeline.router.fleet.request_route import pools_of
from ridgeline.router.fleet.roles import ModeImpossible
from ridgeline.router.front.http.context import MAX_REQUEST_ID_CHARACTERS, current
from ridgeline.router.front.http.errors import error_body
from ridgeline.router.front.middleware.admin_access import ADMIN_PATH, LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH
from ridgeline.router.front.operations import NotTaken, Operation, OperationRuns, Operations, Progress, new_operation
from ridgeline.router.front.single_flight import SingleFlight
from ridgeline.router.live.state import OperationNow
from ridgeline.router.live.view import LiveView
from ridgeline.router.observe.ended_requests import KEPT, SHOWN_BY_DEFAULT, EndedRequests
from ridgeline.router.scheduler.recorded_events import Stopped, line_of
from ridgeline.router.shared.link import NoDispatcher
from ridgeline.router.watching import Wanted

logger = logging.getLogger(__name__)
_WITHOUT: dict[Pool, str] = {
    "prefill": "every prompt is computed on the decode workers",
    "decode": "every request is served whole by the prefill workers",
    "colocated": "nothing can be served",
    "adaptive": "nothing can be served",
}
"""What follows when the last worker of a pool leaves."""
DRAIN_TIMEOUT_S = 30.0
MOST_WORKERS = 1000
MOST_WATCHERS = 32
"""Pages that watch at a time."""
MOST_RECORDERS = 4
"""Recordings at a time."""
RECORDED_S, MOST_RECORDED_S = 3600.0, 86_400.0
RECORDED_BYTES, MOST_RECORDED_BYTES = 64 * MIB, 4096 * MIB
"""The usual and the largest size of a recording. A decision on eight workers takes about 2 KB."""
REFRESH_EVERY_S = 0.5
"""Interval at which workers are asked for their figures when many callers want the list."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DrainBody(_Body):
    """The body of POST /ridgeline/drain."""

    worker: str
    timeout_s: float = Field(default=DRAIN_TIMEOUT_S, ge=0)
    """Time that requests running on the worker still get; then they are cut off."""
    force: bool = False
    """Drain even the last worker of its pool. Needs an admin key: without any worker nothing can be served."""


class ModeBody(_Body):
    """The body of POST /ridgeline/mode."""

    mode: Mode
    why: str = Field(default="", max_length=200)
    """What it is for, which the live page shows."""


class ScaleBody(_Body):
    """The body of POST /ridgeline/scale."""

    workers: dict[Pool, Annotated[int, Field(ge=1, le=MOST_WORKERS)]] = Field(min_length=1)
    """How many workers each of these pools shall have."""
    timeout_s: float = Field(default=DRAIN_TIMEOUT_S, ge=0)
    """Time that requests running on a leaving worker still get; then they go on elsewhere."""


class RestartBody(_Body):
    """The body of POST /ridgeline/restart."""

    timeout_s: float = Field(default=DRAIN_TIMEOUT_S, ge=0)
    """Time that requests running on a worker still get before it is started again; then they go on elsewhere."""


def admin_routes(
    fleet: Fleet,
    modes: Modes,
    operations: Operations,
    ended: EndedRequests,
    live: LiveView,
    record: Callable[[Wanted], AsyncGenerator[bytes, None]],
    stopping: asyncio.Event,
    on_forgotten: Callable[[], None] = lambda: None,
) -> APIRouter:
    """Return the routes below /ridgeline.

    `record` streams what happens to the scheduler, until `stopping` at the latest. `on_forgotten` is called when prefix
    caches have been emptied.
    """
    routes = APIRouter(prefix=ADMIN_PATH, dependencies=[Depends(_only_operators)])

    routes.include_router(_operation_routes(modes, operations))
    refreshed = SingleFlight(fleet.refresh, REFRESH_EVERY_S)

    @routes.get("/workers")
    async def workers() -> Response:
        await refreshed()
        return _json({"workers": [_row(worker) for worker in fleet.workers]})

    one_at_a_time = asyncio.Lock()

    @routes.post("/drain", status_code=HTTPStatus.ACCEPTED)
    async def drain(body: DrainBody) -> dict[str, Any]:
        async with one_at_a_time:  # two drains at once would each count on the other's worker staying
            return await _drain(fleet, body)

    @routes.get("/mode")
    async def mode() -> dict[str, Any]:
        return {"mode": modes.mode, "modes": modes.possible, "why_not": modes.why_not}

    @routes.post("/mode")
    async def change_mode(body: ModeBody) -> dict[str, Any]:
        if body.mode != modes.mode:
            _refuse_change_during(operations, body.mode)
        try:
            change = await modes.change(body.mode)
        except (ModeImpossible, PairingRefused) as error:
            raise HTTPException(HTTPStatus.CONFLICT, f"the mode cannot become {body.mode}: {error}") from error
        live.mode_is_for = body.mode, body.why
        operations.wake()
        return {"mode": change.mode, "rerouted_prompts": change.rerouted_prompts, "took_s": round(change.took_s, 3)}

    @routes.get("/decisions")
    async def decisions(last: Annotated[int, Query(ge=1, le=KEPT)] = SHOWN_BY_DEFAULT) -> Response:
        """Explain the latest decisions of this router, newest first."""
        return _json({"mode": modes.mode, "decisions": ended.decisions(last)})

    @routes.get("/requests")
    async def requests(
        last: Annotated[int, Query(ge=1, le=KEPT)] = SHOWN_BY_DEFAULT,
        request_id: Annotated[str, Query(alias="id", max_length=MAX_REQUEST_ID_CHARACTERS)] = "",
    ) -> Response:
        """Return the latest sequences of this router, or those of one request, newest first."""
        return _json(ended.answer(last, request_id))

    routes.include_router(_live_routes(live, stopping))
    routes.include_router(_record_route(record, stopping))

    @routes.post("/forget_prefixes")
    async def forget_prefixes() -> dict[str, Any]:
        """Empty the workers' prefix caches, for measurements; False for one whose cache is in use."""
        workers = fleet.workers
        forgotten = await asyncio.gather(*map(_forget, workers))
        on_forgotten()
        return {"forgotten": dict(zip((worker.worker_id for worker in workers), forgotten, strict=True))}

    return routes


def adapter_routes(adapters: Adapters) -> APIRouter:
    """Return vLLM's own routes for LoRA adapters, with its bodies and answers, for all workers and all routers."""
    routes = APIRouter(dependencies=[Depends(_only_operators)])

    @routes.post(LOAD_ADAPTER_PATH)
    async def load(body: LoadLoRAAdapterRequest) -> Response:
        try:
            if not body.lora_name or not body.lora_path:
                raise AdapterRefused("Both 'lora_name' and 'lora_path' must be provided.")
            await adapters.load(body.lora_name, body.lora_path, in_place=body.load_inplace)
        except AdapterRefused as error:
            return _refused(HTTPStatus.BAD_REQUEST, error)
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post(UNLOAD_ADAPTER_PATH)
    async def unload(body: UnloadLoRAAdapterRequest) -> Response:
        try:
            found = await adapters.unload(body.lora_name)
        except AdapterRefused as error:
            return _refused(HTTPStatus.SERVICE_UNAVAILABLE, error)
        if not found:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"The lora adapter '{body.lora_name}' cannot be found.")
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return routes


def _refused(status: HTTPStatus, error: AdapterRefused) -> Response:
    """Return the answer itself: vLLM's handler of exceptions takes the paths out of a sentence."""
    return JSONResponse(error_body(status, str(error)), status)


def _live_routes(live: LiveView, stopping: asyncio.Event) -> APIRouter:
    routes, watchers = APIRouter(), asyncio.Semaphore(MOST_WATCHERS)

    @routes.get("/state")
    async def state() -> Response:
        """Return what the live page shows."""
        return _json(live.state())

    @routes.get("/state/stream")
    async def stream() -> StreamingResponse:
        """Send it as server-sent events, one each period, without what has not changed since the first."""
        if watchers.locked():
            raise HTTPException(HTTPStatus.CONFLICT, f"{MOST_WATCHERS} pages watch already: close one first")
        events = _until_stopped(_events(live), watchers, stopping, b"")
        return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})

    return routes


async def _events(live: LiveView) -> AsyncGenerator[bytes, None]:
    async with aclosing(live.stream()) as states:
        async for state in states:
            yield b"data: %b\n\n" % msgspec.json.encode(state)


def _record_route(record: Callable[[Wanted], AsyncGenerator[bytes, None]], stopping: asyncio.Event) -> APIRouter:
    routes, recorders = APIRouter(), asyncio.Semaphore(MOST_RECORDERS)

    @routes.get("/record")
    async def record_events(
        seconds: Annotated[float, Query(gt=0, le=MOST_RECORDED_S)] = RECORDED_S,
        most_bytes: Annotated[int, Query(ge=1, le=MOST_RECORDED_BYTES)] = RECORDED_BYTES,
    ) -> StreamingResponse:
        """Stream what happens to the scheduler as lines of JSON, without any text of prompts or answers."""
        if recorders.locked():
            raise HTTPException(HTTPStatus.CONFLICT, f"{MOST_RECORDERS} recordings are running already: end one first")
        stopped = line_of(Stopped(time.monotonic(), "the server stops"))
        lines = _until_stopped(record(Wanted(seconds, most_bytes)), recorders, stopping, stopped)
        return StreamingResponse(lines, media_type="application/x-ndjson")

    return routes


async def _until_stopped(
    lines: AsyncGenerator[bytes, None], readers: asyncio.Semaphore, stopping: asyncio.Event, last_words: bytes
) -> AsyncGenerator[bytes, None]:
    """Yield the lines; the last one says so if the server stops or the dispatcher is lost.

    Of readers that come together, those who find no room here get nothing, and are refused when they come again.
    """
    if readers.locked():
        return
    async with readers, aclosing(lines):
        stops = asyncio.ensure_future(stopping.wait())
        following: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        try:
            while True:
                following = asyncio.ensure_future(anext(lines, b""))
                await asyncio.wait({following, stops}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    if last_words:
                        yield last_words
                    return
                if not (some := following.result()):
                    return
                yield some
        except NoDispatcher as error:
            yield line_of(Stopped(time.monotonic(), str(error)))
        finally:
            stops.cancel()
            following.cancel()
            await asyncio.wait({stops})
            await asyncio.wait({following})


def _operation_routes(modes: Modes, operations: Operations) -> APIRouter:
    routes = APIRouter()

    async def begun(operation: Operation) -> dict[str, Any]:
        logger.warning("an operator wants %s", operation)
        try:
            return _progress_row(await operations.begin(operation))
        except OperationRuns as error:
            raise HTTPException(HTTPStatus.CONFLICT, str(error)) from error
        except NotTaken as error:
            look = "GET /ridgeline/operation says whether it has begun meanwhile"
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}: {look}") from error

    @routes.post("/scale", status_code=HTTPStatus.ACCEPTED)
    async def scale(body: ScaleBody) -> dict[str, Any]:
        pools = pools_of(modes.mode)
        if unknown := [pool for pool in body.workers if pool not in pools]:
            raise HTTPException(
                HTTPStatus.CONFLICT,
                f"in mode {modes.mode} there is no pool {', '.join(unknown)}: scale {' or '.join(pools)}, or change "
                "the mode first",
            )
        return await begun(new_operation("scale", body.timeout_s, body.workers, mode=modes.mode))

    @routes.post("/restart", status_code=HTTPStatus.ACCEPTED)
    async def restart(body: RestartBody) -> dict[str, Any]:
        return await begun(new_operation("restart", body.timeout_s, {}))

    @routes.get("/operation")
    async def last_operation() -> dict[str, Any]:
        """Return the operation that is under way, or the last one that was; empty if there was none."""
        return {} if operations.last is None else _progress_row(operations.last)

    @routes.delete("/operation", status_code=HTTPStatus.ACCEPTED)
    async def cancel() -> dict[str, Any]:
        """Have it cancelled; its state says when that is done."""
        if operations.last is None or (running := operations.running) is None:
            raise HTTPException(HTTPStatus.CONFLICT, "no operation is under way: there is nothing to cancel")
        logger.warning("an operator cancels operation %s", running.operation_id)
        operations.cancel(running)
        return _progress_row(operations.last)

    return routes


def shown_operation(progress: Progress | None) -> OperationNow | None:
    """Return it for the live page."""
    if progress is None:
        return None
    operation = progress.operation
    wanted = " ".join(f"{pool}={number}" for pool, number in operation.workers.items())
    title = " ".join(filter(None, (operation.kind, wanted)))
    text = f"{title}: {progress.state}" + (f"; {progress.sentences[-1]}" if progress.sentences else "")
    return OperationNow(progress.is_open, text)


def _refuse_change_during(operations: Operations, mode: Mode) -> None:
    """Refuse while pools are scaled, which the other mode may not have; a restart is about all workers in any mode."""
    running = operations.running
    if running is not None and running.kind == "scale":
        raise HTTPException(HTTPStatus.CONFLICT, f"the mode cannot become {mode}: {running.under_way}")


def _progress_row(progress: Progress) -> dict[str, Any]:
    operation = progress.operation
    return {
        "operation": operation.operation_id,
        "kind": operation.kind,
        "workers": operation.workers,
        "mode": operation.mode,
        "state": progress.state,
        "sentences": progress.sentences,
    }


async def _forget(worker: Worker) -> bool:
    try:
        return await worker.client.reset_prefix_cache()
    except WorkerLost:
        return False


async def _drain(fleet: Fleet, body: DrainBody) -> dict[str, Any]:
    worker = _find(fleet, body.worker)
    if _state(worker) != "draining" and _is_last(fleet, worker):  # one that already leaves may be asked to hurry
        _refuse_last(worker, force=body.force)
    logger.warning("an operator drains %s, force: %s", worker.title, body.force)
    try:
        await worker.client.drain(body.timeout_s)
    except WorkerLost as error:
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, f"{body.worker} does not answer: {error}") from error
    await fleet.refresh()  # from now on, nothing new is sent to it
    return _row(worker)


def _refuse_last(worker: Worker, *, force: bool) -> None:
    without = _WITHOUT[worker.pool]
    if not force:
        raise HTTPException(
            HTTPStatus.CONFLICT,
            f"{worker.worker_id} is the last {worker.pool} worker, and without it {without}: start another one, or use "
            "--force",
        )
    if current().admin != "key":
        raise HTTPException(
            HTTPStatus.FORBIDDEN,
            f"{worker.worker_id} is the last {worker.pool} worker, and without it {without}: forcing that takes an "
            "admin key (security.admin_keys_file); to end the server, end `ridgeline serve`",
        )


def _find(fleet: Fleet, worker_id: str) -> Worker:
    for worker in fleet.workers:
        if worker.worker_id == worker_id:
            return worker
    there = sorted(fleet.workers, key=lambda one: (len(one.worker_id), one.worker_id))
    titles = ", ".join(one.title for one in there) or "none"
    raise HTTPException(HTTPStatus.NOT_FOUND, f"there is no worker {worker_id}; there are: {titles}")


def _is_last(fleet: Fleet, leaving: Worker) -> bool:
    """Return whether no other one of its pool can be given work; a stalled engine cannot."""
    staying = (worker for worker in fleet.usable(leaving.pool) if worker is not leaving)
    return not any(worker.status is not None for worker in staying)


def _state(worker: Worker) -> str:
    if not worker.client.connected or worker.status is None:
        return "lost"
    return "draining" if worker.status.draining else "ready"


def _json(told: object) -> Response:
    """Return an answer that may be long: FastAPI would copy it value by value, and streams stand still meanwhile."""
    return Response(msgspec.json.encode(told), media_type="application/json")


def _row(worker: Worker) -> dict[str, Any]:
    status, description = worker.status, worker.description
    return {
        "worker": worker.worker_id,
        "pool": worker.pool,
        "favours": worker.favours,
        "state": _state(worker),
        "incarnation": description.incarnation,
        "host": description.host,
        "rack": description.rack,
        "pid": description.pid,
        "running": status.running if status else None,
        "tasks": status.tasks if status else None,
        "leases": status.counters.get("open_leases", 0.0) if status else None,
        "stalled_s": round(status.stalled_s, 1) if status else None,
    }


async def _only_operators() -> None:
    """Refuse a caller who was not let in as an operator, however the path was written."""
    if not current().admin:
        raise HTTPException(HTTPStatus.FORBIDDEN, "this path is for operators")
