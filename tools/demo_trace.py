"""Writes data/demo.jsonl, the synthetic trace that `make demo` replays. Run it with `python -m tools.demo_trace`.

Lengths follow quantiles of the Azure conversation trace (2023), halved and clipped so that two CPU cores can serve
them. Draws are stratified within each block of requests, so that any beginning of the trace follows the distribution as
well as it can: a slow machine replays only a beginning.
"""

import itertools
import math
import random
from pathlib import Path

import msgspec
import numpy as np

from ridgeline.loadtest.trace.trace import DEMO_FILE

QUANTILES = (0.10, 0.25, 0.50, 0.75, 0.90, 0.99)
AZURE_INPUT_TOKENS = (207, 396, 1020, 1189, 2734, 4142)
AZURE_OUTPUT_TOKENS = (54, 85, 129, 395, 424, 601)
LENGTH_SCALE = 0.5
INPUT_BOUNDS = (128, 1024)
OUTPUT_BOUNDS = (32, 128)
BLOCK_REQUESTS = 20
REQUESTS, RATE, SEED = 200, 0.5, 2023


def write_demo_trace(path: Path = DEMO_FILE) -> None:
    """Write the demo trace in Mooncake's format, without prefix blocks; arrivals are Poisson."""
    source = random.Random(SEED)

    def levels() -> list[float]:
        """Return levels between 0 and 1; each block of them has one in each of its equal parts."""
        drawn: list[float] = []
        for _ in range(REQUESTS // BLOCK_REQUESTS):
            block = [(index + 0.5) / BLOCK_REQUESTS for index in range(BLOCK_REQUESTS)]
            source.shuffle(block)
            drawn += block
        return drawn

    def lengths(quantiles: tuple[int, ...], bounds: tuple[int, int]) -> list[int]:
        scaled = LENGTH_SCALE * np.interp(levels(), QUANTILES, quantiles)
        return [min(bounds[1], max(bounds[0], round(length))) for length in scaled.tolist()]

    inputs, outputs = lengths(AZURE_INPUT_TOKENS, INPUT_BOUNDS), lengths(AZURE_OUTPUT_TOKENS, OUTPUT_BOUNDS)
    gaps_s = [-math.log(1 - level) / RATE for level in levels()]
    arrivals_s = itertools.accumulate(gaps_s[:-1], initial=0.0)
    lines = [
        msgspec.json.encode({"timestamp": round(arrival_s * 1e3), "input_length": tokens, "output_length": answer})
        for arrival_s, tokens, answer in zip(arrivals_s, inputs, outputs, strict=True)
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")


if __name__ == "__main__":
    write_demo_trace()
