"""Writes data/demo.jsonl, the synthetic trace that `make demo` replays. Run it with `python -m loadtest.trace.demo`.

Lengths follow quantiles of the Azure conversation trace (2023), halved and clipped so that two CPU cores can serve
them. Draws are stratified within each block of requests, so that any beginning of the trace follows the distribution as
well as it can: a slow machine replays only a beginning.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from loadtest.trace.trace import DEMO_FILE, TraceRow

QUANTILES = (0.10, 0.25, 0.50, 0.75, 0.90, 0.99)
AZURE_INPUT_TOKENS = (207, 396, 1020, 1189, 2734, 4142)
AZURE_OUTPUT_TOKENS = (54, 85, 129, 395, 424, 601)
LENGTH_SCALE = 0.5
INPUT_BOUNDS = (128, 1024)
OUTPUT_BOUNDS = (32, 128)
BLOCK_REQUESTS = 20


def demo_rows(count: int = 200, rate: float = 0.5, seed: int = 2023) -> list[TraceRow]:
    """Return rows like the Azure conversation trace's at half its lengths, with Poisson arrivals at `rate`."""
    source = random.Random(seed)
    inputs = [_at_quantile(u, AZURE_INPUT_TOKENS, INPUT_BOUNDS) for u in _strata(count, source)]
    outputs = [_at_quantile(u, AZURE_OUTPUT_TOKENS, OUTPUT_BOUNDS) for u in _strata(count, source)]
    gaps_s = [-math.log(1 - u) / rate for u in _strata(count, source)]
    arrivals_s = itertools.accumulate(gaps_s[:-1], initial=0.0)
    return [TraceRow(*row) for row in zip(arrivals_s, inputs, outputs, strict=True)]


def _strata(count: int, source: random.Random) -> Iterator[float]:
    """Yield `count` levels between 0 and 1; each block of them has one in each of its equal parts."""
    for _ in range(math.ceil(count / BLOCK_REQUESTS)):
        levels = [(index + 0.5) / BLOCK_REQUESTS for index in range(BLOCK_REQUESTS)]
        source.shuffle(levels)
        yield from levels


def _at_quantile(level: float, values: Sequence[int], bounds: tuple[int, int]) -> int:
    """Return the inverse distribution at `level`: linear between the known quantiles, constant outside them."""
    points = list(zip(QUANTILES, values, strict=True))
    value = float(values[0] if level < QUANTILES[0] else values[-1])
    for (low, low_value), (high, high_value) in itertools.pairwise(points):
        if low <= level <= high:
            value = low_value + (high_value - low_value) * (level - low) / (high - low)
    return min(bounds[1], max(bounds[0], round(value * LENGTH_SCALE)))


def write_demo_trace(path: Path = DEMO_FILE) -> None:
    """Write the demo trace in Mooncake's format, without prefix blocks."""
    lines = [
        msgspec.json.encode(
            {
                "timestamp": round(row.arrival_s * 1e3),
                "input_length": row.input_tokens,
                "output_length": row.output_tokens,
            }
        )
        for row in demo_rows()
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")


if __name__ == "__main__":
    write_demo_trace()
