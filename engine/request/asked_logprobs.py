"""Log-probabilities of the likeliest tokens for one request and of chosen ids for another, in the same step.

vLLM's first model runner makes one table of log-probabilities a step. If a request in it names ids
(`logprob_token_ids`), the table holds only named ids, and requests that asked for the likeliest tokens get token 0 at
minus infinity. With this change each request gets its own kind of row.

Installed in each rank, before the first request.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad
from vllm.v1.outputs import LogprobsTensors


def keep_rows_apart(runner: Any) -> None:
    """Change the sampler of this model runner if it mixes rows; `runner` is vLLM's GPUModelRunner."""
    sampler: Any = getattr(runner, "sampler", None)
    gather_asked = getattr(sampler, "gather_specific_token_logprobs", None)
    if gather_asked is None:
        return

    def gather(logprobs: torch.Tensor, asked: dict[int, list[int]], sampled: torch.Tensor) -> LogprobsTensors | None:
        named: LogprobsTensors | None = gather_asked(logprobs, asked, sampled)
        likeliest = runner.input_batch.max_num_logprobs
        if named is None or likeliest is None:
            return named
        return _by_row(named, sampler.gather_logprobs(logprobs, likeliest, token_ids=sampled), asked)

    sampler.gather_specific_token_logprobs = gather


def _by_row(named: LogprobsTensors, likeliest: LogprobsTensors, asked: dict[int, list[int]]) -> LogprobsTensors:
    """Take the rows in `asked` from one table and all others from the other; ranks are the sampled token's in both."""
    width = max(named.logprobs.shape[1], likeliest.logprobs.shape[1])
    is_named = torch.zeros(len(named.logprobs), 1, dtype=torch.bool, device=named.logprobs.device)
    is_named[list(asked)] = True

    def rows(ours: torch.Tensor, theirs: torch.Tensor, filler: float) -> torch.Tensor:
        ours, theirs = (pad(table, (0, width - table.shape[1]), value=filler) for table in (ours, theirs))
        return torch.where(is_named, ours, theirs)

    return LogprobsTensors(
        logprob_token_ids=rows(named.logprob_token_ids, likeliest.logprob_token_ids, 0),
        logprobs=rows(named.logprobs, likeliest.logprobs, -torch.inf),
        selected_token_ranks=named.selected_token_ranks,
    )
