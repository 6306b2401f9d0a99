"""Whether prefill fetches the beginning of a prompt that a decode worker has cached, or computes it again.

A later turn of a conversation begins with an answer that only the worker that decoded it has. To fetch that takes a
question to its engine, which answers between two steps, and the transfer; to compute it takes what the step model says.
All of this is estimated here: no number of tokens is worth it on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ridgeline.contracts.handoff import KvLayout
from ridgeline.router.fleet.request_route import Demand
from ridgeline.router.fleet.worker import Worker
from ridgeline.router.placement.learned import Learned
from ridgeline.router.placement.placement_events import Reuse


def best_source(
    demand: Demand, sink: Worker, cached_tokens: int, sources: Sequence[Worker], learned: Learned
) -> Reuse | None:
    """Return the worker from which `sink` fetches the beginning of a prompt, of which it has `cached_tokens` itself.

    None if to compute it takes no longer, or if nobody knows how long steps take.
    """
    model, best, best_gain_s = sink.step_model, None, 0.0
    if model is None or not model.knows_prompts or not demand.prefix:
        return None
    known = learned.prefixes.look_up(demand.prefix)
    for source in sources:
        description, decodes = source.description, source.outstanding.decodes
        tokens = min(known.cached_tokens(source.worker_id, description.incarnation), demand.prompt_tokens - 1)
        tokens -= tokens % _whole_blocks_tokens(description.layout)
        if tokens <= cached_tokens or source.step_model is None:
            continue
        more_tokens = tokens - cached_tokens
        line_s = model.per_prefill_token_s + model.per_attended_token_s * (tokens + cached_tokens) / 2
        compute_s = more_tokens * line_s * model.correction(more_tokens)
        step_s = source.step_model.decode_s(decodes, source.outstanding.context_tokens) if decodes else 0.0
        num_bytes = _bytes_between(description.layout, cached_tokens, tokens)
        fetch_s = step_s + learned.fetch_s(source.worker_id, sink.worker_id, num_bytes)
        if compute_s - fetch_s > best_gain_s:
            best_gain_s = compute_s - fetch_s
            best = Reuse(source.worker_id, description.incarnation, tokens, compute_s)
    return best


def _whole_blocks_tokens(layout: KvLayout) -> int:
    """Return the tokens after which every group of layers has a whole block: caches have prefixes of such lengths."""
    return math.lcm(layout.block_size, *(group.block_size for group in layout.groups))


def _bytes_between(layout: KvLayout, cached_tokens: int, tokens: int) -> int:
    """Return the bytes of what a worker lacks; windows and states that it has from earlier tokens are of no use."""
    blocks = layout.blocks_of(tokens) - (0 if layout.groups else layout.blocks_of(cached_tokens))
    return blocks * layout.block_bytes * layout.num_layers * layout.tensor_parallel_size
