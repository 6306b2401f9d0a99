"""Converts vLLM's log-probabilities to the wire (in the worker) and back into the engine's arrays (in the router)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from ridgeline.contracts.tasks import PositionLogprobs


def pack_position(by_token: Mapping[int, Any], chosen: int) -> PositionLogprobs:
    """Convert one position: `by_token` maps token id to vLLM's Logprob (logprob, rank).

    The engine's own row is the chosen token followed by one token per column: the likeliest ones, or the ids that the
    client asked for, in its order. In vLLM's dictionary a token's rank is its last column; only a chosen token that has
    no column keeps its rank in the vocabulary. It comes last here, and `_arrays` cuts at 1 + num_logprobs.
    """
    columns = {entry.rank: token for token, entry in by_token.items() if token != chosen}
    last = max(columns, default=0)
    columns.setdefault(by_token[chosen].rank, chosen)
    tokens = [chosen]
    for column in sorted(columns):  # a column without a token held a token that appears again in a later column
        tokens += [columns[column]] * (column - len(tokens) + 1 if column <= last else 1)
    return PositionLogprobs(tokens, [float(by_token[token].logprob) for token in tokens], int(by_token[chosen].rank))


def pack_sampled(positions: Sequence[Mapping[int, Any]], token_ids: Sequence[int]) -> list[PositionLogprobs]:
    """Convert the positions of one delta, aligned with its `token_ids`."""
    return [pack_position(entry, token) for entry, token in zip(positions, token_ids, strict=True)]


def pack_prompt(
    positions: Sequence[Mapping[int, Any] | None], prompt_token_ids: Sequence[int]
) -> list[PositionLogprobs | None]:
    """Convert the prompt's positions; the first one is None."""
    return [
        None if entry is None else pack_position(entry, token)
        for entry, token in zip(positions, prompt_token_ids, strict=True)
    ]


def _arrays(
    positions: Sequence[PositionLogprobs], num_logprobs: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    width = num_logprobs + 1 if num_logprobs >= 0 else max(len(position.token_ids) for position in positions)
    token_ids = np.empty((len(positions), width), dtype=np.int64)
    logprobs = np.empty((len(positions), width), dtype=np.float32)
    for row, position in enumerate(positions):
        n = min(width, len(position.token_ids))
        token_ids[row, :n] = position.token_ids[:n]
        logprobs[row, :n] = position.logprobs[:n]
        # Columns are missing only at the end, where the chosen token itself was asked for more than once.
        token_ids[row, n:], logprobs[row, n:] = position.token_ids[0], position.logprobs[0]
    return token_ids, logprobs, np.array([position.chosen_rank for position in positions], dtype=np.int64)


def unpack_sampled(positions: Sequence[PositionLogprobs], num_logprobs: int) -> LogprobsLists:
    """Return arrays for vLLM's output processor: [positions, 1 + num_logprobs]; -1 means the whole vocabulary."""
    token_ids, logprobs, ranks = _arrays(positions, num_logprobs)
    return LogprobsLists(token_ids, logprobs, ranks)


def unpack_prompt(positions: Sequence[PositionLogprobs | None], num_logprobs: int) -> LogprobsTensors:
    """Return tensors for all of the prompt's positions except the first."""
    token_ids, logprobs, ranks = _arrays([p for p in positions if p is not None], num_logprobs)
    return LogprobsTensors(torch.from_numpy(token_ids), torch.from_numpy(logprobs), torch.from_numpy(ranks))
