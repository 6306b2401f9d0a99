"""A whole run of the map of modes against a server without a model, whose three modes differ in a known way.

Colocated and disaggregated answer the later, the more requests are in progress; adaptive answers all alike.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.run import replay as replay_module
from tests.replay.null_server import make_app
from tests.support.patience import eventually
from tools.bench.modes.__main__ import run
from tools.bench.modes.journal import Clock, Journal, RoundEnded, read_journal
from tools.bench.modes.settings import ADAPTIVE, VARIANTS, Settings, save, saved

TTFT_S, TPOT_S = 0.1, 0.01
"""Far above what a busy machine adds."""
ROUNDS_BEFORE_THE_STOP = 5


@pytest.fixture(autouse=True)
def short_text(monkeypatch):
    """Numbers instead of a tokenizer's ids: the text itself is tested elsewhere."""
    monkeypatch.setattr(replay_module, "load_text_tokens", lambda tokenizer: tuple(range(50_000)))


class Modes:
    """The route that switches modes, and the queue that all modes but adaptive have."""

    def __init__(self, modes: tuple[str, ...]) -> None:
        self.modes = modes
        self.mode = modes[0]
        self.in_progress = 0
        self.limits: Counter[tuple[str, str | None, str | None]] = Counter()

    async def get(self, _: web.Request) -> web.Response:
        return web.json_response({"mode": self.mode, "modes": self.modes, "why_not": {}})

    async def post(self, request: web.Request) -> web.Response:
        self.mode = json.loads(await request.read())["mode"]
        return await self.get(request)

    @web.middleware
    async def queue(self, request: web.Request, handler) -> web.StreamResponse:
        if request.path != "/v1/completions":
            return await handler(request)
        headers = request.headers
        self.limits[self.mode, headers.get("x-ridgeline-ttft-ms"), headers.get("x-ridgeline-tpot-ms")] += 1
        self.in_progress += 1
        try:
            if self.mode != ADAPTIVE:
                await asyncio.sleep(TTFT_S * (self.in_progress - 1))
            return await handler(request)
        finally:
            self.in_progress -= 1


@asynccontextmanager
async def served(modes: Modes) -> AsyncIterator[str]:
    app = make_app(TTFT_S, TPOT_S, "unused")
    app.middlewares.append(modes.queue)
    app.router.add_get("/ridgeline/mode", modes.get)
    app.router.add_post("/ridgeline/mode", modes.post)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


def _settings(url: str) -> Settings:
    return Settings(
        workloads=("poisson",),
        ttft_factors=(2.0, 12.0),
        tpot_factors=(3.0, 12.0),
        rate_factors=(1.0, 2.0),
        rates={"poisson": 8.0},
        requests=8,
        most_blocks=1,
        budget_s=300.0,
        url=url,
    )


async def _run(settings: Settings, journal: Journal) -> None:
    console = Console(quiet=True)
    await run(settings, journal, console, Clock(time.monotonic() - journal.spent_s, settings.budget_s))


async def _stopped_after(rounds: int, settings: Settings, journal: Journal) -> None:
    running = asyncio.create_task(_run(settings, journal))
    await eventually(lambda: len(journal.rounds()) >= rounds)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()


async def test_a_run_that_is_stopped_goes_on_and_its_map_says_what_the_modes_do(tmp_path: Path):
    modes = Modes(VARIANTS)
    async with served(modes) as url:
        save(_settings(url), tmp_path)
        await _stopped_after(ROUNDS_BEFORE_THE_STOP, _settings(url), Journal(tmp_path))
        before = read_journal(tmp_path)
        await _run(saved(tmp_path), read_journal(tmp_path))
    journal = read_journal(tmp_path)
    ended = [line for line in journal.lines if isinstance(line, RoundEnded)]
    assert journal.lines[: len(before.lines)] == before.lines
    assert max(Counter(each.spec for each in ended).values()) == 1  # nothing was run twice
    assert [each.number for each in ended] == list(range(len(ended)))

    summary = msgspec.json.decode((tmp_path / "summary.json").read_bytes())
    assert {(cell["ttft_ms"], cell["tpot_ms"]) for cell in summary["cells"]} == {
        (float(ttft), float(tpot)) for mode, ttft, tpot in modes.limits if mode == ADAPTIVE
    }
    assert all((ttft, tpot) == (None, None) for mode, ttft, tpot in modes.limits if mode != ADAPTIVE)
    tight, loose = summary["cells"][0], summary["cells"][-1]
    assert tight["best"] == ADAPTIVE
    assert tight["ratio"]["ratio"] is None or tight["ratio"]["ratio"] > 1  # None: the others served none in time
    assert [at["rate"] for at in loose["adaptive"]["at_rates"]] == [8.0, 16.0]  # from the knee it climbed
    assert loose["colocated"]["requests_per_s"] > tight["colocated"]["requests_per_s"]
    records = (tmp_path / "records.jsonl").read_text().splitlines()
    assert len(records) >= sum(len(each.outcomes) for each in ended)


async def test_the_second_part_tells_attainment_by_phase(tmp_path: Path):
    modes = Modes(VARIANTS)
    async with served(modes) as url:
        settings = msgspec.structs.replace(_settings(url), part="shift", phase_s=2.0, share=0.4)
        await _run(settings, Journal(tmp_path))
    phases = msgspec.json.decode((tmp_path / "summary.json").read_bytes())["phases"]
    assert list(phases) == ["prefill-heavy", "decode-heavy", "prefill-heavy again", "overall"]
    assert (
        sum(phases[name][ADAPTIVE]["requests"] for name in list(phases)[:3]) == phases["overall"][ADAPTIVE]["requests"]
    )
    assert phases["overall"]["difference"]["mean"] >= 0


async def test_a_mode_that_the_deployment_does_not_know_is_refused_by_name(tmp_path: Path):
    modes = Modes(VARIANTS[:2])
    async with served(modes) as url:
        with pytest.raises(LoadTestError, match=r"adaptive.*--variants"):
            await _run(_settings(url), Journal(tmp_path))
