"""Which worker can fetch KV from which other one, and by which transport."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.contracts.errors import WorkerLost
from ridgeline.contracts.handoff import explain_mismatch
from ridgeline.router.fleet.worker import Worker

logger = logging.getLogger(__name__)


class PairingRefused(Exception):
    """Two workers cannot exchange KV; the message names the difference."""


@dataclass(frozen=True)
class KvPair:
    """The transport that carries KV blocks from one worker to another."""

    source: str
    sink: str
    transport: str
    why: str
    """Why no better transport was picked; empty if nothing stood in the way."""

    @property
    def link(self) -> tuple[str, str]:
        """From which worker to which."""
        return self.source, self.sink


Sources = Mapping[Worker, Sequence[Worker]]
"""From which other workers each of some fetches KV."""


async def pair_all(sources: Sources) -> list[KvPair]:
    """Make every worker agree on a transport with each of its sources, before any request.

    Raises PairingRefused or WorkerLost. A prefill worker can do without: it computes what it cannot fetch.
    """
    check_layouts(sources)
    answers = await asyncio.gather(*(_pair(its, sink) for sink, its in sources.items()))
    for sink, (_, refused) in zip(sources, answers, strict=True):
        if refused and sink.pool != "prefill":
            raise PairingRefused(refused[0])
        for sentence in refused:
            logger.warning("%s computes again what the other has cached: %s", sink.title, sentence)
    return [pair for paired, _ in answers for pair in paired]


async def pair_while_serving(sources: Sequence[Worker], sink: Worker) -> list[KvPair]:
    """Pair one worker with its sources while requests are served, when any worker may be lost at any moment.

    Workers that cannot be paired now pair when they come back, or at their first fetch.
    """
    try:
        paired, refused = await _pair(sources, sink)
    except WorkerLost as error:
        paired, refused = [], [f"{sink.title}: {error}"]
    for sentence in refused:
        logger.warning("not paired for now: %s", sentence)
    return paired


def check_layouts(sources: Sources) -> None:
    """Raise PairingRefused if KV layouts differ, which waiting cannot fix."""
    for sink, its in sources.items():
        for source in its:
            sentence = explain_mismatch(source.description.layout, sink.description.layout)
            if sentence is not None:
                raise PairingRefused(f"{source.title} and {sink.title} cannot exchange KV: {sentence}")


async def _pair(sources: Sequence[Worker], sink: Worker) -> tuple[list[KvPair], list[str]]:
    """Return the agreed pairs, and a sentence for each refusal. Raises WorkerLost if the fetching worker is silent."""
    by_address = {address: worker for worker in sources for address in worker.description.transfer_addresses}
    answer = await sink.client.pair(list(by_address))
    refused = [
        f"{by_address[address].title} and {sink.title} cannot exchange KV: {sentence}"
        for address, sentence in answer.refused.items()
    ]
    pairs = [
        KvPair(by_address[address].worker_id, sink.worker_id, transport, why)
        for address, (transport, why) in answer.paired.items()
    ]
    return list(dict.fromkeys(pairs)), refused  # each rank has its own address
