"""Two engines that hand over to each other, with vLLM's real schedulers: that both are full must not stop them."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support import stepping_scheduler
from tests.support.samples import LAYOUT

# isort: split
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from ridgeline.contracts.handoff import TransferResult
from ridgeline.engine.connector import scheduler_side
from ridgeline.engine.connector.messages import Endpoint, TransferResults
from ridgeline.engine.step_scheduler import BoundedScheduler

CACHE_BLOCKS = 101
LONG_TOKENS = 60 * stepping_scheduler.BLOCK_TOKENS
"""Two such prompts do not fit into one cache."""
OK = TransferResult(outcome="ok")


class Engine:
    def __init__(self, scheduler: Any, add: Any) -> None:
        self.scheduler = scheduler
        self.add = add
        self.sent: set[str] = set()
        self.received: dict[str, TransferResult] = {}

    def step(self) -> tuple[Any, list[Any]]:
        """Run one step, which reports the transfers that have ended; returns what it was told and its outputs."""
        scheduled = self.scheduler.schedule()
        told, names = scheduled.kv_connector_metadata, list(scheduled.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        report = KVConnectorOutput(
            finished_sending=self.sent or None,
            finished_recving=set(self.received) or None,
            kv_connector_worker_meta=TransferResults(self.received, None if told.idle else told.step),
        )
        self.sent, self.received = set(), {}
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[7] if one.num_computed_tokens >= one.num_tokens else [] for one in requests],
            kv_connector_output=report,
        )
        batches = self.scheduler.update_from_output(scheduled, output).values()
        return told, [one for batch in batches for one in batch.outputs]


class Pair:
    """Two engines; a transfer between them takes a step, and the other engine decodes what one has computed."""

    def __init__(self, engines: list[Engine]) -> None:
        self.engines = engines
        self.tokens: defaultdict[str, int] = defaultdict(int)
        """Those of each answer."""

    def send(self, name: str, engine: int) -> None:
        transfer = {"do_remote_decode": True, "handoff_id": f"{engine} {name}"}
        self.engines[engine].add(name, LONG_TOKENS, 1, kv_transfer_params=transfer)

    def step(self) -> None:
        for number, engine in enumerate(self.engines):
            told, outputs = engine.step()
            for fetch in told.fetch:
                engine.received[fetch.request_id] = OK
            for handoff in [*told.release, *(fetch.handoff for fetch in told.fetch)]:
                source, owner = handoff.handoff_id.split(" ")
                self.engines[int(source)].sent.add(owner)
            for output in outputs:
                self.tokens[output.request_id] += len(output.new_token_ids)
                if (handoff := (output.kv_transfer_params or {}).get("handoff")) is not None:
                    transfer = {"do_remote_prefill": True, "handoff": handoff}
                    name = f"{output.request_id}-decoded"
                    self.engines[1 - number].add(name, LONG_TOKENS, 4, kv_transfer_params=transfer)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    def make() -> Engine:
        made = stepping_scheduler.make(
            BoundedScheduler, tmp_path, monkeypatch, num_blocks=CACHE_BLOCKS, hands_over=True
        )
        endpoint = Endpoint("127.0.0.1:7001", LAYOUT.compatibility_hash(), CACHE_BLOCKS, 2048)
        made.scheduler.connector.set_xfer_handshake_metadata({0: endpoint})
        return Engine(made.scheduler, made.add)

    return Pair([make(), make()])


def test_two_engines_that_are_full_of_what_they_wait_to_hand_to_each_other_go_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scheduler_side, "STUCK_S", 0.01)
    pair.send("a", 0)
    pair.send("b", 1)
    for _ in range(2000):
        pair.step()
        if pair.tokens["a-decoded"] == pair.tokens["b-decoded"] == 4:
            break
    assert (pair.tokens["a-decoded"], pair.tokens["b-decoded"]) == (4, 4)
    pair.step()
    assert not any(engine.scheduler.has_requests() for engine in pair.engines), "and nobody keeps any blocks"


def test_prompts_that_fit_beside_each_other_are_handed_over_in_both_directions(pair: Pair):
    pair.send("a", 0)
    for _ in range(6):
        pair.step()
    pair.send("b", 1)
    for _ in range(12):
        pair.step()
    assert (pair.tokens["a-decoded"], pair.tokens["b-decoded"]) == (4, 4)
    counters = [engine.scheduler.connector.scheduler.counters for engine in pair.engines]
    assert not any("recompute_total.no_room" in one for one in counters)
