"""The requests of each workload: a slice of a trace in a file of the run's folder, or requests of one size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from loadtest.plan import ComparePlan
from loadtest.trace.readers import load_trace
from loadtest.trace.shape import fit_context
from loadtest.trace.trace import Trace, TraceRow
from loadtest.trace.windows import PairTraces
from tools.bench.modes.settings import FROM_FILES, Settings

POISSON: Final = "poisson:rate=1,input=512,output=64,n={rows},seed={seed}"
SETTLE_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload; `plan` names its requests, and has neither rate nor number of them."""

    name: str
    plan: ComparePlan
    note: str
    """What the requests are, in words."""

    def round_trace(self, window: int, requests: int, rate: float, max_model_tokens: int | None) -> Trace:
        """Return a window of the requests, scaled so that its own mean rate is the one asked for."""
        traces = PairTraces(self.plan.model_copy(update={"limit": requests}), max_model_tokens)
        return traces.at_rate(window, rate)

    def longest_output_tokens(self) -> int:
        """Return the tokens of the longest answer."""
        return max(row.output_tokens for row in load_trace(self.plan.trace).rows)


def workload(name: str, settings: Settings, folder: Path, max_model_tokens: int | None) -> Workload:
    """Make a workload; a slice is written to the folder. Raises TraceError if the trace cannot be read."""
    if name not in FROM_FILES:
        spec = POISSON.format(rows=settings.rows, seed=settings.seed)
        return Workload(name, plan_of(spec, settings), "512 tokens in, 64 out, Poisson")
    source, scale = settings.traces[name], settings.scales[name]
    whole = load_trace(source)
    sliced = fit_context(scaled(whole, scale, settings.rows), max_model_tokens)
    path = folder / "traces" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(mooncake_lines(sliced.rows))
    mean_in = sum(row.input_tokens for row in sliced.rows) / len(sliced.rows)
    mean_out = sum(row.output_tokens for row in sliced.rows) / len(sliced.rows)
    note = (
        f"the first {len(sliced.rows)} requests of {Path(source).name}, prompts x {scale[0]:g} and answers x "
        f"{scale[1]:g}: {mean_in:.0f} tokens in and {mean_out:.0f} out on average"
    )
    return Workload(name, plan_of(str(path), settings), note)


def scaled(trace: Trace, scale: tuple[float, float], rows: int) -> Trace:
    """Return the first rows with prompts and answers scaled, each of a token at least."""
    kept = tuple(
        replace(
            row,
            input_tokens=max(1, round(row.input_tokens * scale[0])),
            output_tokens=max(1, round(row.output_tokens * scale[1])),
        )
        for row in trace.rows[:rows]
    )
    return replace(trace, rows=kept)


def mooncake_lines(rows: tuple[TraceRow, ...]) -> bytes:
    """Encode rows as a file that `loadtest.trace.readers` reads."""
    lines = [
        msgspec.json.encode(
            {"timestamp": row.arrival_s * 1e3, "input_length": row.input_tokens, "output_length": row.output_tokens}
        )
        for row in rows
    ]
    return b"\n".join(lines) + b"\n"


def plan_of(trace: str, settings: Settings) -> ComparePlan:
    """Return the plan of rounds of this trace, without rate and limits."""
    return ComparePlan.model_validate({"trace": trace, "seed": settings.seed, "settle_s": SETTLE_S})
