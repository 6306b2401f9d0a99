"""Which prefill worker can hand KV to which decode worker, and by what.

Called by `router.fleet.fleet` when workers come.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from contracts.errors import WorkerLost
from contracts.handoff import explain_mismatch
from contracts.workers import WorkerDescription
from worker_runtime.client import WorkerClient

logger = logging.getLogger(__name__)


class PairingRefused(Exception):
    """A prefill and a decode worker cannot exchange KV; the message names what differs."""


@dataclass(frozen=True)
class KvPair:
    """What carries KV blocks from a prefill worker to a decode worker."""

    prefill: str
    decode: str
    transport: str
    why: str
    """What stood in the way of a better transport; empty if nothing."""


class Connected(Protocol):
    """What pairing reads of a worker."""

    client: WorkerClient
    description: WorkerDescription

    @property
    def worker_id(self) -> str: ...


async def pair_all(prefills: Sequence[Connected], decodes: Sequence[Connected]) -> list[KvPair]:
    """Every decode worker agrees with every prefill worker on what will carry the bytes, before any request.

    Raises PairingRefused or WorkerLost.
    """
    check_layouts(prefills, decodes)
    answers = await asyncio.gather(*(_pair(prefills, decode) for decode in decodes))
    for _, refused in answers:
        if refused:
            raise PairingRefused(refused[0])
    return [pair for paired, _ in answers for pair in paired]


async def pair_while_serving(prefills: Sequence[Connected], decode: Connected) -> list[KvPair]:
    """The same for one decode worker while requests are served, when it or any other may be lost at this moment.

    Who cannot be paired now pairs when it comes back, or when it first fetches.
    """
    try:
        paired, refused = await _pair(prefills, decode)
    except WorkerLost as error:
        paired, refused = [], [f"{decode.worker_id}: {error}"]
    for sentence in refused:
        logger.warning("not paired for now: %s", sentence)
    return paired


def check_layouts(prefills: Sequence[Connected], decodes: Sequence[Connected]) -> None:
    """Raises PairingRefused if a KV layout differs, which no waiting mends."""
    for prefill, decode in product(prefills, decodes):
        sentence = explain_mismatch(prefill.description.layout, decode.description.layout)
        if sentence is not None:
            raise PairingRefused(f"{prefill.worker_id} and {decode.worker_id} cannot exchange KV: {sentence}")


async def _pair(prefills: Sequence[Connected], decode: Connected) -> tuple[list[KvPair], list[str]]:
    """What was agreed, and a sentence for each refusal. Raises WorkerLost if the decode worker does not answer."""
    sources = {address: worker for worker in prefills for address in worker.description.transfer_addresses}
    answer = await decode.client.pair(list(sources))
    refused = [
        f"{sources[address].worker_id} and {decode.worker_id} cannot exchange KV: {sentence}"
        for address, sentence in answer.refused.items()
    ]
    pairs = [
        KvPair(sources[address].worker_id, decode.worker_id, transport, why)
        for address, (transport, why) in answer.paired.items()
    ]
    return list(dict.fromkeys(pairs)), refused  # each rank has an address of its own
