"""The groups of layers of a KV cache: which blocks of each group a hand-off holds, in which order.

Each group has a block table of its own, and all share one pool: vLLM lays the groups over each other in one allocation,
and a block belongs to one group at a time. Its bytes over all regions of the allocation are those of that group's
layers. So a hand-off is one list of blocks and one transfer, whatever the groups.

Both ends compute the list from the groups and the number of tokens. Groups that keep every token come first, ordered by
the tokens of their blocks, because only they grow while the prompt is computed: what is final is always the beginning
of the list. Of a window only what the next token reads follows, and of a state its last value, once both are final.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from ridgeline.engine.connector.transferable_models import UnsupportedModel

Kind = Literal["full", "window", "chunk", "state"]
KINDS: Final[Mapping[type, Kind]] = {
    FullAttentionSpec: "full",
    MLAAttentionSpec: "full",
    SlidingWindowSpec: "window",
    ChunkedLocalAttentionSpec: "chunk",
    MambaSpec: "state",
}


@dataclass(frozen=True)
class CacheGroup:
    """Layers with one block table, and which of its blocks whoever goes on after a prompt reads."""

    number: int
    """Its place in vLLM's tuples of block tables."""
    kind: Kind
    block_size_tokens: int
    spec: Any
    """vLLM's description of one of its layers."""

    @classmethod
    def of(cls, number: int, spec: Any) -> CacheGroup:
        """Return vLLM's group `number`. Raises UnsupportedModel for a kind of cache that is not known."""
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = spec.first_spec
        kind = KINDS.get(type(spec))
        if kind is None:
            raise UnsupportedModel(f"the KV cache of this model is of an unsupported kind ({type(spec).__name__})")
        return cls(number, kind, spec.block_size, spec)

    @property
    def name(self) -> str:
        """What two engines must have alike: kind, tokens in a block, and how far a layer sees or what a state is."""
        reach = ""
        if self.kind == "window":
            reach = f":{self.spec.sliding_window}"
        elif self.kind == "chunk":
            reach = f":{self.spec.attention_chunk_size}"
        elif self.kind == "state":
            reach = "".join(f":{str(dtype).removeprefix('torch.')}" for dtype in self.spec.dtypes)
        return f"{self.kind}:{self.block_size_tokens}{reach}"

    def live(self, num_tokens: int) -> range:
        """Return the places in the block table of what the token after `num_tokens` reads.

        Counted by tokens, because a table may have blocks behind the last one that is filled.
        """
        end = -(-num_tokens // self.block_size_tokens)
        match self.kind:
            case "state":
                first_token = (end - 1) * self.block_size_tokens
            case "window":
                first_token = num_tokens - self.spec.sliding_window + 1
            case "chunk":
                first_token = num_tokens - num_tokens % self.spec.attention_chunk_size
            case _:
                first_token = 0
        return range(max(0, first_token) // self.block_size_tokens, end)


class CacheGroups:
    """All groups of one engine, in the order of a hand-off's list."""

    def __init__(self, config: KVCacheConfig) -> None:
        """Raises UnsupportedModel for a kind of cache that is not known."""
        found = [CacheGroup.of(number, group.kv_cache_spec) for number, group in enumerate(config.kv_cache_groups)]
        self.all = sorted(found, key=lambda group: group.kind != "full")
        self.growing = [group for group in found if group.kind == "full"]
        block_size_tokens = math.lcm(*(group.block_size_tokens for group in found))
        self.hash_block_size_tokens = config.hash_block_size or block_size_tokens
        """Each so many tokens of a request have a hash in vLLM's prefix cache."""
        has_states = any(group.kind == "state" for group in found)
        self.longest_tail_tokens = block_size_tokens - self.hash_block_size_tokens if has_states else 0
        """How many tokens vLLM may have found beyond the blocks that it tells a connector of."""

    @property
    def alone(self) -> bool:
        """Whether there is one group, which keeps every token."""
        return len(self.all) == len(self.growing) == 1

    @property
    def names(self) -> tuple[str, ...]:
        """What two engines must have alike; empty if one group keeps every token."""
        return () if self.alone else tuple(group.name for group in self.all)

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks a hand-off of so many tokens has."""
        return sum(len(group.live(num_tokens)) for group in self.all)

    def num_grown(self, num_tokens: int) -> int:
        """Return how many blocks at the beginning of the list are full once so many tokens are computed."""
        return sum(num_tokens // group.block_size_tokens for group in self.growing)

    def listed(self, tables: Sequence[Sequence[int]], num_tokens: int) -> list[int]:
        """Prefill: return the list, from the request's block tables."""
        listed = [tables[number][place] for number, place in self._order(num_tokens, self.all)]
        if not all(listed):
            raise RuntimeError(f"vLLM took back a block of {self.names} that is to be handed over: {tables}")
        return listed

    def grown(self, tables: Sequence[Sequence[int]], num_tokens: int) -> list[int]:
        """Prefill: return the beginning of the list that is final once so many tokens are computed."""
        order = self._order(num_tokens, self.growing)
        return [tables[number][place] for number, place in order][: self.num_grown(num_tokens)]

    def missing(self, tables: Sequence[Sequence[Any]], num_tokens: int) -> dict[int, list[int]]:
        """Decode: return what the prefix cache lacks, as {first position: blocks to fill} of each run of positions.

        `tables` are vLLM's blocks of the request: those found have a hash, and those allocated for the load none.
        """
        runs: dict[int, list[int]] = {}
        end = -1
        for position, (number, place) in enumerate(self._order(num_tokens, self.all)):
            block = tables[number][place]
            if block.block_hash is not None:
                continue
            if block.is_null:
                raise RuntimeError(f"vLLM allocated no block for position {position} of {self.names}")
            if position != end:
                run = runs[position] = []
            run.append(block.block_id)
            end = position + 1
        return runs

    def _order(self, num_tokens: int, groups: Sequence[CacheGroup]) -> Iterator[tuple[int, int]]:
        """Yield (group number, place in its block table) of each position."""
        several = len(self.growing) > 1
        if several:
            growing = [(group, place) for group in self.growing for place in group.live(num_tokens)]
            growing.sort(key=lambda one: (one[1] + 1) * one[0].block_size_tokens)
            yield from ((group.number, place) for group, place in growing)
        for group in groups:
            if not (several and group.kind == "full"):
                yield from ((group.number, place) for place in group.live(num_tokens))


def regions(kv_caches: Mapping[str, Any], config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """View the allocation as rows of blocks: each place once, by the name of the first layer that lies there.

    `kv_caches` are the layers' views of it; a recurrent layer has several. Raises UnsupportedModel if places differ in
    the bytes of a block.
    """
    first = next(iter(kv_caches.values()))
    tensor = first if isinstance(first, torch.Tensor) else first[0]
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    pages: dict[str, int] = {}
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        of_layer = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
        pages.update({name: of_layer.get(name, spec).page_size_bytes for name in group.layer_names})
    places: dict[int, str] = {}
    sizes: set[tuple[int, int]] = set()
    for part in config.kv_cache_tensors:
        for index, name in enumerate(part.layers):
            places.setdefault(part.offset + index * part.layer_stride, name)
            sizes.add((pages[name], part.block_stride))
    if len(sizes) > 1:
        shown = " and ".join(str(page) for page, _ in sorted(sizes))
        raise UnsupportedModel(f"the layers of this model have KV blocks of different sizes ({shown} bytes)")
    [(page, stride)] = sizes
    return {
        name: torch.as_strided(raw, (config.num_blocks, page), (stride, 1), start)
        for start, name in sorted(places.items())
    }
