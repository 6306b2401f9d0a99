"""Generates requests of one size with exponential gaps: `poisson:rate=2,input=512,output=64,n=100,seed=1`."""

import math
import random
from collections.abc import Iterator

from ridgeline.loadtest.errors import TraceError
from ridgeline.loadtest.trace.trace import TraceRow

GENERATED = "poisson:"
DEFAULTS = {"rate": 1.0, "input": 512.0, "output": 64.0, "n": 100.0, "seed": 0.0}


def poisson_rows(spec: str) -> Iterator[TraceRow]:
    """Yield the requests that a specification describes; a key that it lacks has its default. Raises TraceError."""
    values = _values(spec)
    source = random.Random(int(values["seed"]))
    arrival_s = 0.0
    for _ in range(int(values["n"])):
        yield TraceRow(arrival_s, int(values["input"]), int(values["output"]))
        arrival_s += source.expovariate(values["rate"])


def _values(spec: str) -> dict[str, float]:
    values = dict(DEFAULTS)
    for item in filter(None, spec.removeprefix(GENERATED).split(",")):
        key, _, text = item.partition("=")
        try:
            if key not in values:
                raise ValueError(f"unknown key '{key}', the keys are {', '.join(values)}")
            values[key] = float(text)
            if not math.isfinite(values[key]):
                raise ValueError(f"{key} must be a number, not {text}")
            if key != "rate" and not values[key].is_integer():
                raise ValueError(f"{key} must be a whole number")
        except ValueError as error:
            raise TraceError(f"the trace '{spec}' is not understood: {error}") from error
    if values["rate"] <= 0 or min(values["n"], values["input"], values["output"]) < 1:
        raise TraceError(
            f"the trace '{spec}' is not understood: rate must be above 0, and n, input and output at least 1"
        )
    return values
