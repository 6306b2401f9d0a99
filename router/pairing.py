"""Which prefill worker can hand KV to which decode worker, and by what. Called by `fleet.py` when workers come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from engine.data_plane import WorkerClient
from engine.errors import WorkerLost
from engine.messages import WorkerDescription
from kv_transfer.handoff import explain_mismatch

UNSURE_S = 1.0


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


async def pair(
    prefills: Sequence[Connected], decodes: Sequence[Connected], new: Connected | None = None
) -> list[KvPair]:
    """Every decode worker agrees with every prefill worker on what will carry the bytes, before any request.

    Raises PairingRefused or WorkerLost. If one is `new`, the others serve meanwhile and may be lost meanwhile: those
    pair when they come back.
    """
    _check_layouts(prefills, decodes)
    sources = {address: worker for worker in prefills for address in worker.description.transfer_addresses}
    pairs: list[KvPair] = []
    for decode in decodes:
        try:
            answer = await decode.client.pair(list(sources))
        except WorkerLost:
            if new in (None, decode):
                raise
            continue
        for address, sentence in answer.refused.items():
            if new is not None and await _is_lost(sources[address]):
                continue
            raise PairingRefused(f"{sources[address].worker_id} and {decode.worker_id} cannot exchange KV: {sentence}")
        for address, (transport, why) in answer.paired.items():
            pair = KvPair(sources[address].worker_id, decode.worker_id, transport, why)
            if pair not in pairs:
                pairs.append(pair)
    return pairs


async def _is_lost(worker: Connected) -> bool:
    """Its peer could not reach it: its connection to us breaks about as soon."""
    await asyncio.sleep(UNSURE_S)
    return not worker.client.connected


def _check_layouts(prefills: Sequence[Connected], decodes: Sequence[Connected]) -> None:
    for prefill, decode in product(prefills, decodes):
        sentence = explain_mismatch(prefill.description.layout, decode.description.layout)
        if sentence is not None:
            raise PairingRefused(f"{prefill.worker_id} and {decode.worker_id} cannot exchange KV: {sentence}")
