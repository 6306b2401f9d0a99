"""The nouns of a hand-off: what the two engines must agree on, what is offered, and what came of it.

A prefill engine publishes blocks and describes them in a `KvHandoff`; the router carries that, opaque, to a decode
engine; the decode engine's fetch ends in one `TransferResult`. Used in every process; pure data, no I/O.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions that msgspec raises for bytes that are not the expected message."""

WIRE_VERSION = 6
"""The protocol version, which must be the same in both workers: raise it when frames or messages change."""


HANDOFF_ID_CHARACTERS: Final = 64
HandoffId = Annotated[str, msgspec.Meta(max_length=HANDOFF_ID_CHARACTERS)]
"""A hand-off's id as a peer may send it; longer ones are refused, because closed ids are remembered."""


class LayerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers with one block table, and which of its blocks a sequence needs."""

    kind: Literal["full", "window", "chunk", "state"]
    """Whether a layer keeps every token, the nearest ones, those of a chunk, or only a recurrent state."""
    block_size: int
    reach_tokens: int = 0
    """Tokens of a window or a chunk."""
    state: str = ""
    """What a state is made of."""

    def live(self, num_tokens: int) -> range:
        """Return the places in the block table of what the token after `num_tokens` reads.

        Counted by tokens, because a table may have blocks behind the last one that is filled.
        """
        end = -(-num_tokens // self.block_size)
        match self.kind:
            case "state":
                first_token = (end - 1) * self.block_size
            case "window":
                first_token = num_tokens - self.reach_tokens + 1
            case "chunk":
                first_token = num_tokens - num_tokens % self.reach_tokens
            case _:
                first_token = 0
        return range(max(0, first_token) // self.block_size, end)

    def held(self, num_tokens: int) -> int:
        """Return how many blocks a sequence of so many tokens holds while it decodes."""
        blocks = -(-num_tokens // self.block_size)
        match self.kind:
            case "state":
                return min(blocks, STATES_HELD)
            case "window":
                return min(blocks, -(-self.reach_tokens // self.block_size) + 1)
            case "chunk":
                return min(blocks, -(-self.reach_tokens // self.block_size))
            case _:
                return blocks


STATES_HELD: Final = 2
"""Blocks of a sequence's states: the one before this step, and the one that it writes."""


def blocks_of(tokens: int, block_size: int, groups: Sequence[LayerGroup] = ()) -> int:
    """Return the KV blocks that a sequence of so many tokens holds."""
    return sum(group.held(tokens) for group in groups) if groups else -(-tokens // block_size)


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides what a block's bytes mean. `explain_mismatch` says which two can exchange KV."""

    model: str
    dtype: str
    kv_dtype: str
    block_size: int
    num_layers: int
    """Places in the cache with a row of blocks; layers of different groups share them."""
    num_kv_heads: int
    """The model's KV heads, over all ranks."""
    block_bytes: int
    """Bytes of one block in one layer on one rank."""
    groups: tuple[LayerGroup, ...] = ()
    """The groups of layers in the order of a hand-off's list of blocks; empty for one that keeps every token."""
    layout: str
    isa: str
    """What determines the order of bytes in a block: the instruction set a CPU packs them for, or a GPU's attention
    kernels."""
    engine_version: str
    tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1)]
    weights: str = ""
    """A short name for the weights: of two revisions of one model it differs; empty if not known."""
    heads_are_runs: bool = True
    """Whether a rank's KV heads are one run of bytes in a block, so that they can be split and joined by slicing."""
    wire_version: int = WIRE_VERSION

    def blocks_of(self, tokens: int) -> int:
        """Return the KV blocks that a sequence of so many tokens holds."""
        return blocks_of(tokens, self.block_size, self.groups)

    def compatibility_hash(self) -> str:
        """Return a short name for this layout: equal hashes mean equal layouts."""
        return hashlib.sha256(msgspec.msgpack.encode(self, order="deterministic")).hexdigest()[:32]


def explain_mismatch(ours: KvLayout, theirs: KvLayout) -> str | None:
    """Return a sentence that names each field that differs, with both values.

    None if blocks of one mean the same to the other.

    Tensor parallelism may differ where one side's ranks hold a whole number of the other's: heads are split or joined.
    """
    differing = [
        f"{name} is {getattr(ours, name)!r} here and {getattr(theirs, name)!r} there"
        for name in KvLayout.__struct_fields__
        if name not in ("tensor_parallel_size", "block_bytes") and getattr(ours, name) != getattr(theirs, name)
    ]
    tp = (ours.tensor_parallel_size, theirs.tensor_parallel_size)
    if tp[0] != tp[1] and not (ours.heads_are_runs and theirs.heads_are_runs):
        differing.append(
            f"tensor_parallel_size is {tp[0]} here and {tp[1]} there, and in these blocks the KV heads of a rank do "
            "not lie together"
        )
    elif min(tp) < 1 or max(tp) % min(tp):
        differing.append(f"tensor_parallel_size is {tp[0]} here and {tp[1]} there, and neither divides the other")
    elif ours.block_bytes * tp[0] != theirs.block_bytes * tp[1]:
        differing.append(
            f"block_bytes is {ours.block_bytes} on {tp[0]} ranks here and {theirs.block_bytes} on {tp[1]} there"
        )
    if not differing:
        return None
    return "the engines cannot exchange KV blocks: " + "; ".join(differing) + "."


def new_handoff_id() -> str:
    """Make an id that cannot be guessed: knowing it entitles a peer to read the blocks."""
    return secrets.token_urlsafe(18)


def shown_id(handoff_id: str) -> str:
    """Return a hand-off's name for logs and messages: the same in both processes' logs, and useless for fetching."""
    return hashlib.sha256(handoff_id.encode()).hexdigest()[:12]


class KvHandoff(msgspec.Struct, frozen=True, kw_only=True):
    """An offer: these sources hold the KV of `num_tokens` tokens, kept for `lease_s` after each renewal.

    A fetch names positions from 0 to `num_blocks`, whose order both ends know, never a source's own block numbers.
    """

    handoff_id: str
    addresses: tuple[str, ...]
    """host:port of each of the source's tensor parallel ranks, in rank order."""
    num_blocks: int
    num_tokens: int
    compatibility_hash: str
    lease_s: float
    num_bytes: int
    """Bytes of the blocks, over all layers and ranks."""
    adapter: str = ""
    """The key of the LoRA adapter that computed it; empty: the model alone."""
    complete: bool = True
    """False while prefill still computes: a fetch then overlaps with it, and its result brings the first token."""
    fetch_within_s: float = 0.0
    """How long its fetch may take, if that is less than what the fetching worker allows; 0: no less."""

    def to_params(self) -> dict[str, Any]:
        """Convert to plain msgpack types, for vLLM's `kv_transfer_params`."""
        params: dict[str, Any] = msgspec.to_builtins(self)
        return params | {"addresses": list(self.addresses)}

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> KvHandoff:
        """Convert back from `to_params`; raises `msgspec.ValidationError` naming the bad field."""
        return msgspec.convert(dict(params), cls)


FetchOutcome = Literal["ok", "failed", "cancelled"]


class TransferResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one fetch ended. `reason` is empty or one of `ridgeline.contracts.errors.REASONS`."""

    outcome: FetchOutcome
    reason: str = ""
    message: str = ""
    num_bytes: int = 0
    """Bytes written to the local pool; fewer may have travelled, if they were encoded."""
    wait_s: float = 0.0
    """Seconds from asking to the first byte; for a partial hand-off, to the first byte of its last segment; if no byte
    came, all of the time."""
    wire_s: float = 0.0
    """Seconds from the first byte to the last; for a partial hand-off, of its last segment, or of that segment's last
    layer."""
    transport: str = ""
    """The transport that carried the bytes; empty if no source was reached."""
    first_token: int | None = None
    """The token that prefill sampled, if the fetch overlapped with the prefill."""
    num_tokens: int = 0
    """Of a prompt whose beginning another worker had: how many of its tokens were fetched."""
