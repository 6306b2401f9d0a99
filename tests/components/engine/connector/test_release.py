"""An engine's own hand-offs that no router will release: told to its ranks, together, and never in anybody's way."""

import asyncio

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from ridgeline.engine.connector.messages import STALE_HANDOFFS, CounterStats
from ridgeline.engine.vllm_engine import VllmEngine
from tests.support.patience import eventually
from tests.support.samples import engine_config


class Ranks:
    """Takes calls one at a time, each as long as `answer` is not set."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self.answer = asyncio.Event()
        self._error = error

    async def collective_rpc(self, method: str, args: tuple[list[str]]) -> list[None]:
        self.calls.append((method, args[0]))
        await self.answer.wait()
        if self._error is not None:
            raise self._error
        return [None]


def an_engine(ranks: Ranks) -> VllmEngine:
    engine = VllmEngine(engine_config("prefill"))
    engine._llm = ranks
    return engine


async def test_hand_offs_given_up_while_the_ranks_are_told_of_others_go_together():
    ranks = Ranks()
    engine = an_engine(ranks)
    engine.release_own("first")
    await eventually(lambda: ranks.calls)
    for name in ("second", "third"):
        engine.release_own(name)
    ranks.answer.set()
    await eventually(lambda: len(ranks.calls) == 2)
    assert ranks.calls == [("ridgeline_release", ["first"]), ("ridgeline_release", ["second", "third"])]
    await eventually(lambda: engine._releasing is None)
    engine.release_own("fourth")
    await eventually(lambda: len(ranks.calls) == 3)


async def test_an_engine_that_is_dead_holds_nothing_to_release():
    ranks = Ranks(EngineDeadError())
    engine = an_engine(ranks)
    ranks.answer.set()
    engine.release_own("first")
    await eventually(lambda: ranks.calls and engine._releasing is None)
    assert engine._to_release == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_lingers_on_any_rank_is_told(ranks: int):
    told = CounterStats(data={STALE_HANDOFFS: ["a"], "open_leases": 1.0})
    if ranks == 2:
        told = told.aggregate(CounterStats(data={STALE_HANDOFFS: ["b"], "open_leases": 1.0}))
    assert told.data == {STALE_HANDOFFS: ["a", "b"][:ranks], "open_leases": 1.0}
