"""Which prefill worker can hand KV off to which decode worker, and by which transport."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from ridgeline.contracts.errors import WorkerLost
from ridgeline.contracts.handoff import explain_mismatch
from ridgeline.contracts.workers import WorkerDescription
from ridgeline.worker_runtime.client import WorkerClient

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


class Connected(Protocol):
    """The parts of a worker that pairing uses."""

    client: WorkerClient
    description: WorkerDescription

    @property
    def worker_id(self) -> str: ...

    @property
    def title(self) -> str: ...


async def pair_all(prefills: Sequence[Connected], decodes: Sequence[Connected]) -> list[KvPair]:
    """Make every decode worker agree on a transport with every prefill worker, before any request.

    Raises PairingRefused or WorkerLost.
    """
    check_layouts(prefills, decodes)
    answers = await asyncio.gather(*(_pair(prefills, decode) for decode in decodes))
    for _, refused in answers:
        if refused:
            raise PairingRefused(refused[0])
    return [pair for paired, _ in answers for pair in paired]


async def pair_while_serving(prefills: Sequence[Connected], decode: Connected) -> list[KvPair]:
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


def check_layouts(prefills: Sequence[Connected], decodes: Sequence[Connected]) -> None:
    """Raise PairingRefused if KV layouts differ, which waiting cannot fix."""
    for prefill, decode in product(prefills, decodes):
        if prefill is decode:
            continue
        sentence = explain_mismatch(prefill.description.layout, decode.description.layout)
        if sentence is not None:
            raise PairingRefused(f"{prefill.title} and {decode.title} cannot exchange KV: {sentence}")


async def _pair(prefills: Sequence[Connected], decode: Connected) -> tuple[list[KvPair], list[str]]:
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
