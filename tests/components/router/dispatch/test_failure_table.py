"""Every row of the failure table on real gRPC: two prefill and two decode hosts, a real fleet, stepped engines.

The fake engine's tokens are a function of everything before them, so a lost or repeated token changes the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.sampling_params import SamplingParams

from ridgeline.cluster.runtime.handlers import HANDLERS
from ridgeline.contracts.errors import EngineError, EngineFailed
from ridgeline.contracts.handoff import KvHandoff, TransferResult
from ridgeline.contracts.tasks import TokenDelta
from ridgeline.engine.connector.events import TransferEvent
from ridgeline.router.dispatch.orchestrator import DeadlineExceeded, Orchestrator
from ridgeline.router.dispatch.request import SequenceRequest
from ridgeline.router.fleet.fleet import Fleet
from ridgeline.router.front.sampling import sampling_of
from ridgeline.router.observe.metrics import RequestMetrics
from ridgeline.router.placement.cluster_state import ClusterState
from ridgeline.router.placement.places import own_placement
from ridgeline.worker_runtime.host import WorkerHost
from tests.support.failure_table import CANNOT_HAPPEN, FAULTS, ROWS, STATES, Row, as_markdown
from tests.support.fake_engine import FakeEngine
from tests.support.patience import PATIENCE_S, eventually
from tests.support.samples import TIMING, engine_config, make_handoff, next_token, router_settings

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "operate.md"
PROMPT = list(range(70))
OUTPUT_TOKENS = 6
SETTINGS = router_settings()
CLIENT_TIMEOUT_S = SETTINGS.router.request_timeout_s - 0.5
"""No other timeout is so long: by it the request's own is told, which only the test of deadlines lets run out."""


def undisturbed() -> list[int]:
    context = list(PROMPT)
    for _ in range(OUTPUT_TOKENS):
        context.append(next_token(context))
    return context[len(PROMPT) :]


class Workers:
    """Two prefill and two decode workers, each stepped by hand, and one request on its way through them."""

    def __init__(self) -> None:
        self.engines: dict[str, FakeEngine] = {}
        self.hosts: dict[str, WorkerHost] = {}
        self.addresses: list[str] = []
        self.tokens: list[int] = []
        self.endings = 0
        self.released: list[str] = []
        self.registry = CollectorRegistry()
        self.deadlines: list[asyncio.Timeout] = []
        """Of the requests."""
        self.running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        for pool in ("prefill", "decode"):
            for index in range(2):
                name = f"{pool}-{index}"
                engine = FakeEngine(pool, stepping="manual")  # type: ignore[arg-type]
                engine.config = engine_config(pool, name)  # type: ignore[arg-type]
                self.engines[name] = engine
                self.hosts[name] = WorkerHost(engine, HANDLERS)  # type: ignore[arg-type,index]
                self.addresses.append(await self.hosts[name].start())

    def emit(self, delta: TokenDelta) -> bool:
        self.tokens += delta.token_ids
        self.endings += delta.finished
        return False

    def release(self, handoff: KvHandoff, after_s: float) -> None:
        self.released.append(handoff.handoff_id)

    def begin(self, orchestrator: Orchestrator) -> None:
        wish = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        request = SequenceRequest("r", PROMPT, sampling_of(wish), timeout_s=CLIENT_TIMEOUT_S)
        self.running = asyncio.create_task(orchestrator.run(request, self.emit))

    def busy(self, pool: str) -> str | None:
        """The worker of a pool whose engine has a request."""
        names = [name for name, engine in self.engines.items() if name.startswith(pool) and engine.running]
        return names[0] if names else None

    async def reach(self, state: str) -> None:
        """Step engines until the request is in this state."""
        if state == "queued":
            await asyncio.sleep(0.02)
            return
        await eventually(lambda: self.busy("prefill"))
        if state == "prefilling":
            return
        self.engines[self.busy("prefill")].step()
        await eventually(lambda: self.busy("decode"))
        await eventually(lambda: len(self.tokens) == 1)
        if state == "decoding":
            for count in (2, 3):
                self.engines[self.busy("decode")].step()
                await eventually(lambda count=count: len(self.tokens) == count)

    async def run_on(self) -> None:
        """Step everything until the request has ended."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.running.done():
                for engine in self.engines.values():
                    engine.step()
                await asyncio.sleep(0.01)

    async def stop_host(self, name: str) -> None:
        """As a SIGKILL looks from outside: the connection breaks, its engine's requests are gone."""
        host = self.hosts.pop(name)
        await host._server.stop(0)
        for session in host._sessions.values():
            session.abort(list(session.tasks))

    async def everything_is_free(self) -> None:
        await eventually(lambda: not any(engine.running for engine in self.engines.values()))

    def count(self, series: str) -> float:
        """The value of `name{label="value",...}`, added up over the labels that are not given."""
        name, _, labels = series.removesuffix("}").partition("{")
        wanted = dict(pair.replace('"', "").split("=") for pair in labels.split(","))
        families = text_string_to_metric_families(generate_latest(self.registry).decode())
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and wanted.items() <= sample.labels.items()
        )


class _Over(Exception):
    """Ends the fleet's tasks."""


@asynccontextmanager
async def workers() -> AsyncIterator[tuple[Workers, Fleet, Orchestrator]]:
    running = Workers()
    await running.start()
    fleet = Fleet("router")
    metrics = RequestMetrics(running.registry)
    placement = own_placement(ClusterState(fleet, SETTINGS), fleet, SETTINGS)
    orchestrator = Orchestrator(placement, SETTINGS, metrics, running.release)

    try:
        async with asyncio.TaskGroup() as group:
            await fleet.connect(running.addresses, group)
            yield running, fleet, orchestrator
            raise _Over
    except* _Over:
        pass
    finally:
        await asyncio.gather(*(host.stop() for host in running.hosts.values()))


# --- how each fault is brought about; `at` is the worker that has the request, if any


async def _lose(running: Workers, fleet: Fleet, pool: str) -> None:
    name = running.busy(pool) or f"{pool}-0"
    await running.stop_host(name)
    await eventually(lambda: not fleet.get(name).client.connected)


async def prefill_lost(running: Workers, fleet: Fleet, row: Row) -> None:
    await _lose(running, fleet, "prefill")
    if row.state == "handoff":
        _decode_will_recompute(running, "unreachable")


async def decode_lost(running: Workers, fleet: Fleet, row: Row) -> None:
    if row.state == "prefilling":
        name = next(name for name in ("decode-0", "decode-1") if fleet.get(name).outstanding.running)
        await running.stop_host(name)
    else:
        await _lose(running, fleet, "decode")


async def transfer_failed(running: Workers, fleet: Fleet, row: Row) -> None:
    if row.state == "handoff":
        _decode_will_recompute(running, "timeout")
        return
    prefill = running.engines[running.busy("prefill")]
    handoff_id = prefill.calls[-1].transfer["handoff_id"]
    partial = msgspec.structs.replace(make_handoff(handoff_id, len(PROMPT)), complete=False)
    prefill.transfer_events.deliver([msgspec.to_builtins(TransferEvent(handoff_id=handoff_id, handoff=partial))])
    await eventually(lambda: running.busy("decode"))
    decode = running.engines[running.busy("decode")]
    decode.transfer_events.deliver([msgspec.to_builtins(TransferEvent(handoff_id=handoff_id, failed="unreachable"))])


async def lease_expired(running: Workers, fleet: Fleet, row: Row) -> None:
    _decode_will_recompute(running, "lease_expired")


async def deadline(running: Workers, fleet: Fleet, row: Row) -> None:
    [its_own] = running.deadlines
    its_own.reschedule(asyncio.get_running_loop().time())
    with pytest.raises(DeadlineExceeded, match="x-ridgeline-timeout-s"):
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.shield(running.running)


async def client_gone(running: Workers, fleet: Fleet, row: Row) -> None:
    running.running.cancel()


async def draining(running: Workers, fleet: Fleet, row: Row) -> None:
    pool = "prefill" if row.state == "prefilling" else "decode"
    name = running.busy(pool) or f"{pool}-0"
    await running.hosts[name].drain(0.05)
    await fleet.refresh()


async def engine_error(running: Workers, fleet: Fleet, row: Row) -> None:
    pool = "prefill" if row.state == "prefilling" else "decode"
    engine = running.engines[running.busy(pool) or f"{pool}-0"]
    engine.failed = True
    engine.error = EngineFailed("the engine process died")
    await fleet.refresh()


async def router_restarted(running: Workers, fleet: Fleet, row: Row) -> None:
    running.running.cancel()  # what is left of it in this process; on the workers, only the broken streams tell
    for task in asyncio.all_tasks():
        if task.get_name().startswith("client-"):
            task.cancel()


INJECT: dict[str, Callable[..., object]] = {
    "prefill_lost": prefill_lost,
    "decode_lost": decode_lost,
    "transfer_failed": transfer_failed,
    "lease_expired": lease_expired,
    "deadline": deadline,
    "client_gone": client_gone,
    "draining": draining,
    "engine_error": engine_error,
    "router_restarted": router_restarted,
}


def _decode_will_recompute(running: Workers, reason: str) -> None:
    result = TransferResult(outcome="failed", reason=reason)
    running.engines[running.busy("decode")].timing = msgspec.structs.replace(TIMING, transfer_result=result)


def test_every_state_and_fault_has_a_row_or_a_reason_why_not() -> None:
    rows = [(row.state, row.fault) for row in ROWS]
    assert len(set(rows)) == len(rows)
    assert {*rows, *CANNOT_HAPPEN} == {(state, fault) for state in STATES for fault in FAULTS}
    assert not {*rows} & {*CANNOT_HAPPEN}
    assert {*INJECT} == {*FAULTS}, "a fault that no test brings about"


def test_the_document_is_the_table() -> None:
    assert as_markdown() in PAGE.read_text(), "run: python -m tests.components.router.dispatch.test_failure_table"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.fault} while {row.state}")
async def test_what_the_table_says_of(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ridgeline.worker_runtime.host.SETTLED_S", 0.1
    )  # else every row of a drain waits a second at its end
    async with workers() as (running, fleet, orchestrator):
        timeout = asyncio.timeout

        def noted(within_s: float | None) -> asyncio.Timeout:
            made = timeout(within_s)
            if within_s == CLIENT_TIMEOUT_S:
                running.deadlines.append(made)
            return made

        monkeypatch.setattr("asyncio.timeout", noted)
        if row.state == "queued":  # nobody can take it yet
            for name in ("decode-0", "decode-1"):
                running.engines[name].failed = True
            await fleet.refresh()
        running.begin(orchestrator)
        await running.reach(row.state)
        await INJECT[row.fault](running, fleet, row)
        if row.state == "queued":
            await asyncio.sleep(0.05)
            spared = [name for name in ("decode-1", "decode-0") if name in running.hosts]
            running.engines[spared[0]].failed = False
            await fleet.refresh()
        if row.ending == "whole":
            await running.run_on()
            await running.running
            assert running.tokens == undisturbed(), "every token once, in its place"
            assert running.endings == 1
        else:
            await asyncio.wait([running.running], timeout=PATIENCE_S)
            error = None if running.running.cancelled() else running.running.exception()
            assert running.running.cancelled() if row.ending == "gone" else isinstance(error, Exception)
            assert running.endings == 0
        await running.everything_is_free()
        assert running.registry.get_sample_value("ridgeline_requests_in_flight") == 0
        if row.counted:
            assert running.count(row.counted) >= 1, row.counted
        else:
            assert running.count('ridgeline_requests_total{outcome="finished"}') == 1
        if (
            "the hand-off" in row.released
            and row.state == "handoff"
            and row.fault not in ("transfer_failed", "lease_expired")
        ):
            assert running.released, "the router gives the hand-off back"


async def test_a_request_that_fails_every_worker_ends_after_a_few_attempts() -> None:
    async with workers() as (running, _, orchestrator):
        for name in ("prefill-0", "prefill-1"):
            running.engines[name].error = EngineFailed("this prompt breaks it")
        running.begin(orchestrator)
        await running.run_on()
        assert isinstance(running.running.exception(), EngineError)
        calls = sum(len(running.engines[name].calls) for name in ("prefill-0", "prefill-1"))
        assert calls == 4, "one attempt and three more"
        await running.everything_is_free()


if __name__ == "__main__":
    before, begins, rest = PAGE.read_text().partition("<!-- failures -->\n")
    PAGE.write_text(before + begins + as_markdown() + "".join(rest.partition("<!-- /failures -->")[1:]))
