"""Generates traces from a line of text: requests of one size, and sessions of agents.

`poisson:rate=2,input=512,output=64,n=100,seed=1` has requests of one size with exponential gaps.

`agentic:sessions=20,rate=0.2,turns=8` has agents. An agent's first prompt has `system` tokens that all agents share
and `input` more. Each later turn adds `added` tokens, such as a tool's result, after a delay of `tool_s` seconds. After
every `every` turns `agents` sub-agents work beside one another, each with `agent_turns` turns of a context of its own;
the next turn waits for all of them. `added`, `output` and `tool_s` are means of exponential draws.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping

from ridgeline.loadtest.errors import TraceError
from ridgeline.loadtest.trace.trace import MOONCAKE_BLOCK_TOKENS, Trace, TraceRow

POISSON: Mapping[str, float] = {"rate": 1.0, "input": 512, "output": 64, "n": 100, "seed": 0}
AGENTIC: Mapping[str, float] = {
    "sessions": 20,
    "rate": 0.2,
    "turns": 8,
    "system": 512,
    "input": 256,
    "added": 128,
    "output": 64,
    "tool_s": 2.0,
    "agents": 2,
    "agent_turns": 2,
    "every": 3,
    "n": 0,
    "seed": 0,
}
"""With `n` there are so many requests, of as many sessions as that takes."""
MAY_BE_FRACTIONS = {"rate", "tool_s"}
MAY_BE_ZERO = {"system", "agents", "every", "tool_s", "n", "seed"}


def is_generated(name: str) -> bool:
    """Whether the name of a trace is a specification."""
    return name.partition(":")[0] in GENERATORS


def generated_trace(spec: str) -> Trace:
    """Return the trace that a specification describes; a key that it lacks has its default. Raises TraceError."""
    defaults, make = GENERATORS[spec.partition(":")[0]]
    values = _values(spec, defaults)
    rows = tuple(make(values, random.Random(int(values["seed"]))))
    return Trace(spec, rows, int(values.get("system", 0)) or MOONCAKE_BLOCK_TOKENS)


def seed_of(spec: str) -> int:
    """Return the seed that a specification names, or 0. Raises TraceError."""
    return int(_values(spec, GENERATORS[spec.partition(":")[0]][0])["seed"])


def _poisson(values: Mapping[str, float], source: random.Random) -> Iterator[TraceRow]:
    arrival_s = 0.0
    for _ in range(int(values["n"])):
        yield TraceRow(arrival_s, int(values["input"]), int(values["output"]))
        arrival_s += source.expovariate(values["rate"])


def _agentic(values: Mapping[str, float], source: random.Random) -> list[TraceRow]:
    rows: list[TraceRow] = []
    requests = int(values["n"])
    arrival_s, session = 0.0, 0
    while len(rows) < requests if requests else session < values["sessions"]:
        _add_session(rows, values, source, TraceRow(arrival_s, 0, 0, session=str(session)))
        arrival_s += source.expovariate(values["rate"])
        session += 1
    return rows[: requests or None]


def _add_session(rows: list[TraceRow], values: Mapping[str, float], source: random.Random, begun: TraceRow) -> None:
    """Add the requests of an agent and its sub-agents, each after those that it waits for."""

    def drawn(key: str) -> int:
        return max(1, round(source.expovariate(1 / values[key])))

    def agent(turns: int, kind: int, spawner: tuple[int, ...]) -> int:
        """Add an agent's turns, and those of its sub-agents if it is the main one; return the place of its last."""
        after, tokens = spawner, int(values["system"] + values["input"])
        for turn in range(turns):
            is_first = not turn
            row = TraceRow(
                begun.arrival_s,
                tokens,
                drawn("output"),
                (kind,) if is_first and values["system"] else (),
                begun.session,
                source.expovariate(1 / values["tool_s"]) if values["tool_s"] and not is_first else 0.0,
                after=after,
                fresh=is_first,
            )
            place = len(rows)
            rows.append(row)
            after, tokens = (place,), tokens + row.output_tokens + drawn("added")
            if not kind and values["every"] and (turn + 1) % values["every"] == 0 and turn + 1 < turns:
                after += tuple(agent(int(values["agent_turns"]), 1, (place,)) for _ in range(int(values["agents"])))
        return place

    agent(int(values["turns"]), 0, ())


def _values(spec: str, defaults: Mapping[str, float]) -> dict[str, float]:
    values = dict(defaults)
    try:
        for item in filter(None, spec.partition(":")[2].split(",")):
            key, _, text = item.partition("=")
            if key not in values:
                raise ValueError(f"unknown key '{key}', the keys are {', '.join(values)}")
            values[key] = float(text)
            if not math.isfinite(values[key]):
                raise ValueError(f"{key} must be a number, not {text}")
            if key not in MAY_BE_FRACTIONS and not values[key].is_integer():
                raise ValueError(f"{key} must be a whole number")
            if key == "rate" and values[key] <= 0:
                raise ValueError("rate must be above 0")
            least = 0 if key in MAY_BE_ZERO - ({"n"} if defaults["n"] else set()) or key == "rate" else 1
            if values[key] < least and key != "seed":
                raise ValueError(f"{key} must be at least {least}")
    except ValueError as error:
        raise TraceError(f"the trace '{spec}' is not understood: {error}") from error
    return values


GENERATORS: Mapping[
    str, tuple[Mapping[str, float], Callable[[Mapping[str, float], random.Random], Iterator[TraceRow] | list[TraceRow]]]
] = {"poisson": (POISSON, _poisson), "agentic": (AGENTIC, _agentic)}
