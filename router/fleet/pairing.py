"""Which prefill worker can hand KV off to which decode worker, and by which transport."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ridgeline.contracts.errors import WorkerLost
from ridgeline.contracts.handoff import explain_mismatch
from ridgeline.router.fleet.worker import Worker

logger = logging.getLogger(__name__)


class PairingRefused(Exception):
    """A prefill and a decode worker cannot exchange KV; the message names the difference."""


@dataclass(frozen=True)
class KvPair:
    """The transport that carries KV blocks from a prefill worker to a decode worker."""

    prefill: str
    decode: str
    transport: str
    why: str
    """Why no better transport was picked; empty if nothing stood in the way."""


async def pair_all(prefills: Sequence[Worker], decodes: Sequence[Worker]) -> list[KvPair]:
    """Make every decode worker agree on a transport with every prefill worker, before any request.

    Raises PairingRefused or WorkerLost.
    """
    check_layouts(prefills, decodes)
    answers = await asyncio.gather(*(_pair(prefills, decode) for decode in decodes))
    for _, refused in answers:
        if refused:
            raise PairingRefused(refused[0])
    return [pair for paired, _ in answers for pair in paired]


async def pair_while_serving(prefills: Sequence[Worker], decode: Worker) -> list[KvPair]:
    """Pair one decode worker while requests are served, when any worker may be lost at any moment.

    Workers that cannot be paired now pair when they come back, or at their first fetch.
    """
    try:
        paired, refused = await _pair(prefills, decode)
    except WorkerLost as error:
        paired, refused = [], [f"{decode.title}: {error}"]
    for sentence in refused:
        logger.warning("not paired for now: %s", sentence)
    return paired


def check_layouts(prefills: Sequence[Worker], decodes: Sequence[Worker]) -> None:
    """Raise PairingRefused if KV layouts differ, which waiting cannot fix."""
    for prefill, decode in product(prefills, decodes):
        if prefill is decode:
            continue
        sentence = explain_mismatch(prefill.description.layout, decode.description.layout)
        if sentence is not None:
            raise PairingRefused(f"{prefill.title} and {decode.title} cannot exchange KV: {sentence}")


async def _pair(prefills: Sequence[Worker], decode: Worker) -> tuple[list[KvPair], list[str]]:
    """Return the agreed pairs, and a sentence for each refusal. Raises WorkerLost if the decode worker is silent."""
    others = [worker for worker in prefills if worker.worker_id != decode.worker_id]
    sources = {address: worker for worker in others for address in worker.description.transfer_addresses}
    answer = await decode.client.pair(list(sources))
    refused = [
        f"{sources[address].title} and {decode.title} cannot exchange KV: {sentence}"
        for address, sentence in answer.refused.items()
    ]
    pairs = [
        KvPair(sources[address].worker_id, decode.worker_id, transport, why)
        for address, (transport, why) in answer.paired.items()
    ]
    return list(dict.fromkeys(pairs)), refused  # each rank has its own address
