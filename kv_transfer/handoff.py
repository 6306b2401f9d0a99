"""The nouns of a hand-off: what the two engines must agree on, what is offered, and what came of it.

A prefill engine publishes blocks and describes them in a `KvHandoff`; the router carries that, opaque, to a decode
engine; the decode engine's fetch ends in one `FetchReceipt`. Used in every process; pure data, no I/O.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

WIRE_VERSION = 1
"""History, one line each: 1 = checksummed frames of whole blocks, one layer per frame, msgpack control messages."""


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides what a block's bytes mean. Two engines may exchange KV only if theirs are equal."""

    model: str
    dtype: str
    kv_dtype: str
    block_size_tokens: int
    num_layers: int
    block_bytes: int
    """Bytes of one block in one layer."""
    layout: str
    isa: str
    """The instruction set a CPU packs its blocks for, or the GPU's architecture."""
    engine_version: str
    tensor_parallel_size: int
    wire_version: int = WIRE_VERSION

    def compatibility_hash(self) -> str:
        """A short name for this layout: equal hashes mean equal layouts."""
        return hashlib.sha256(msgspec.msgpack.encode(self, order="deterministic")).hexdigest()[:32]


def explain_mismatch(ours: KvLayout, theirs: KvLayout) -> str | None:
    """A sentence naming each field that differs with both its values; None if the layouts are equal."""
    differing = [
        f"{name} is {getattr(ours, name)!r} here and {getattr(theirs, name)!r} there"
        for name in KvLayout.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
    ]
    if not differing:
        return None
    return "the engines cannot exchange KV blocks: " + "; ".join(differing) + "."


def new_handoff_id() -> str:
    """An id that cannot be guessed: knowing it is what entitles a peer to read the blocks."""
    return secrets.token_urlsafe(18)


class KvHandoff(msgspec.Struct, frozen=True, kw_only=True):
    """An offer: these blocks of this source hold the KV of `num_tokens` tokens, kept for `lease_s` after each renewal.

    `block_ids` are the source's and are listed in token order; a fetch names positions in this list, never raw ids.
    """

    handoff_id: str
    address: str
    """host:port of the source."""
    block_ids: tuple[int, ...]
    num_tokens: int
    compatibility_hash: str
    lease_s: float
    num_bytes: int

    def to_params(self) -> dict[str, Any]:
        """As plain msgpack types, for vLLM's `kv_transfer_params`."""
        params: dict[str, Any] = msgspec.to_builtins(self)
        return params | {"block_ids": list(self.block_ids)}

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> KvHandoff:
        """The inverse of `to_params`; raises `msgspec.ValidationError` naming the bad field."""
        return msgspec.convert(dict(params), cls)


Outcome = Literal["ok", "failed", "cancelled"]


class FetchReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """What one fetch came to. `reason` is empty or one of `kv_transfer.errors.REASONS`."""

    outcome: Outcome
    reason: str = ""
    message: str = ""
    num_bytes: int = 0
    """Payload bytes that reached the local pool."""
    wait_s: float = 0.0
    """From asking to the first byte; the whole time if no byte came."""
    wire_s: float = 0.0
    """From the first byte to the last."""
