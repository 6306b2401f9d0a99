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
from typing import Any

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

from ridgeline.contracts.handoff import LayerGroup
from ridgeline.engine.connector.transferable_models import UnsupportedModel


@dataclass(frozen=True)
class CacheGroup:
    """A group, its place in vLLM's tuples of block tables, and vLLM's description of one of its layers."""

    number: int
    layers: LayerGroup
    spec: Any

    @property
    def grows(self) -> bool:
        """Whether it keeps every token."""
        return self.layers.kind == "full"


def layer_group(spec: Any) -> LayerGroup:
    """Return what is to be known of layers that vLLM describes so. Raises UnsupportedModel for an unknown kind."""
    kind, size = type(spec), spec.block_size
    if kind in (FullAttentionSpec, MLAAttentionSpec):
        return LayerGroup(kind="full", block_size=size)
    if kind is SlidingWindowSpec:
        return LayerGroup(kind="window", block_size=size, reach_tokens=spec.sliding_window)
    if kind is ChunkedLocalAttentionSpec:
        return LayerGroup(kind="chunk", block_size=size, reach_tokens=spec.attention_chunk_size)
    if kind is MambaSpec:
        dtypes = " ".join(str(dtype).removeprefix("torch.") for dtype in spec.dtypes)
        return LayerGroup(kind="state", block_size=size, state=dtypes)
    raise UnsupportedModel(f"the KV cache of this model is of an unsupported kind ({kind.__name__})")


class CacheGroups:
    """All groups of one engine, in the order of a hand-off's list."""

    def __init__(self, config: KVCacheConfig) -> None:
        """Raises UnsupportedModel for a kind of cache that is not known."""
        found = []
        for number, group in enumerate(config.kv_cache_groups):
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.first_spec
            found.append(CacheGroup(number, layer_group(spec), spec))
        self.all = sorted(found, key=lambda group: not group.grows)
        self.growing = [group for group in found if group.grows]
        block_size_tokens = math.lcm(*(group.layers.block_size for group in found))
        self.hash_block_size_tokens = config.hash_block_size or block_size_tokens
        """Each so many tokens of a request have a hash in vLLM's prefix cache."""
        has_states = any(group.layers.kind == "state" for group in found)
        self.longest_tail_tokens = block_size_tokens - self.hash_block_size_tokens if has_states else 0
        """How many tokens vLLM may have found beyond the blocks that it tells a connector of."""

    @property
    def alone(self) -> bool:
        """Whether there is one group, which keeps every token."""
        return len(self.all) == len(self.growing) == 1

    @property
    def layers(self) -> tuple[LayerGroup, ...]:
        """What two engines must have alike; empty if one group keeps every token."""
        return () if self.alone else tuple(group.layers for group in self.all)

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks a hand-off of so many tokens has."""
        return sum(len(group.layers.live(num_tokens)) for group in self.all)

    def num_grown(self, num_tokens: int) -> int:
        """Return how many blocks at the beginning of the list are full once so many tokens are computed."""
        return sum(num_tokens // group.layers.block_size for group in self.growing)

    def listed(self, tables: Sequence[Sequence[int]], num_tokens: int) -> list[int]:
        """Prefill: return the list, from the request's block tables."""
        listed = [tables[number][place] for number, place in self._order(num_tokens, self.all)]
        if not all(listed):
            raise RuntimeError(f"vLLM took back a block of {self.layers} that is to be handed over: {tables}")
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
                raise RuntimeError(f"vLLM allocated no block for position {position} of {self.layers}")
            if position != end:
                run = runs[position] = []
            run.append(block.block_id)
            end = position + 1
        return runs

    def _order(self, num_tokens: int, groups: Sequence[CacheGroup]) -> Iterator[tuple[int, int]]:
        """Yield (group number, place in its block table) of each position."""
        several = len(self.growing) > 1
        if several:
            growing = [(group, place) for group in self.growing for place in group.layers.live(num_tokens)]
            growing.sort(key=lambda one: (one[1] + 1) * one[0].layers.block_size)
            yield from ((group.number, place) for group, place in growing)
        for group in groups:
            if not (several and group.grows):
                yield from ((group.number, place) for place in group.layers.live(num_tokens))


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
