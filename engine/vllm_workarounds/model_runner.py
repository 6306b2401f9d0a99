"""Changes of vLLM's model runner, installed in each rank before the first request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from vllm.v1.outputs import LogprobsTensors

from ridgeline.engine.speculation import WITHOUT_KV


def put_generators_back(runner: Any) -> None:
    """Make seeded requests work on CPU when their prompt takes several steps; `runner` is vLLM's GPUModelRunner.

    vLLM samples for every sequence of a step, even if its prompt is not complete yet. It throws that token away and
    winds the sequence's random generator back by an offset that only GPU generators have. On CPU this raises an error,
    which ends the engine. Here the generator's state is restored instead.
    """
    if torch.device(runner.device).type != "cpu":
        return
    sample, bookkeep = runner._sample, runner._bookkeeping_sync

    def sample_and_put_back(*args: Any, **kwargs: Any) -> Any:
        states = [(generator, generator.get_state()) for generator in _of_unfinished_prompts(runner)]
        output = sample(*args, **kwargs)
        for generator, state in states:
            generator.set_state(state)
        return output

    def bookkeep_without_generators(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        generators, batch.generators = batch.generators, {}  # the original only winds them back
        try:
            return bookkeep(*args, **kwargs)
        finally:
            batch.generators = generators

    runner._sample = sample_and_put_back
    runner._bookkeeping_sync = bookkeep_without_generators


def _of_unfinished_prompts(runner: Any) -> Iterator[torch.Generator]:
    batch = runner.input_batch
    for index in np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]):
        generator = batch.generators.get(int(index))
        if generator is not None:
            yield generator


def compile_drafts(runner: Any) -> None:
    """Compile the look-up of n-grams, in the types of `runner`, before the first sequence that drafts waits for it.

    vLLM's own warm-up has no sequence with a token, and so compiles nothing. The step that then does takes seconds, in
    which the engine neither ends what is cancelled nor tells what it holds.
    """
    drafter = getattr(runner, "drafter", None)  # of vLLM's first model runner
    # Its class is not imported: that imports numba, after which vLLM cannot make an engine in the same process.
    if drafter is not None and runner.speculative_config.method == WITHOUT_KV:
        batch = runner.input_batch
        drafter.propose(drafter.k, [[0]], batch.num_tokens_no_spec, batch.token_ids_cpu)


def keep_rows_apart(runner: Any) -> None:
    """Give each request its own kind of log-probability row; `runner` is vLLM's GPUModelRunner.

    vLLM's first model runner makes one table of log-probabilities a step. If a request in it names ids
    (`logprob_token_ids`), the table holds only named ids, and requests that asked for the likeliest tokens get token 0
    at minus infinity. In a step with drafts it makes none for named ids, and fails if others want the likeliest.
    """
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
    if hasattr(runner, "rejection_sampler"):
        _keep_drafted_rows_apart(runner.rejection_sampler, gather_asked)


def _keep_drafted_rows_apart(rejection: Any, gather_asked: Any) -> None:
    sample, sampler = rejection.forward, rejection.sampler
    gather_likeliest = sampler.gather_logprobs

    def sample_with_named_rows(drafts: Any, draft_probs: Any, logits: torch.Tensor, sampling: Any) -> Any:
        asked = sampling.logprob_token_ids
        if not asked:
            return sample(drafts, draft_probs, logits, sampling)

        def gather(logprobs: torch.Tensor, likeliest: int, sampled: torch.Tensor) -> LogprobsTensors:
            each = len(logprobs) // len(drafts.num_draft_tokens)  # a row for each token that a sequence may get
            rows = {at * each + place: ids for at, ids in asked.items() for place in range(each)}
            named = gather_asked(logprobs, rows, sampled)
            return _by_row(named, gather_likeliest(logprobs, likeliest, sampled), rows)

        sampler.gather_logprobs = gather
        try:
            unnamed = replace(sampling, logprob_token_ids=None, max_num_logprobs=sampling.max_num_logprobs or 0)
            return sample(drafts, draft_probs, logits, unnamed)
        finally:
            sampler.gather_logprobs = gather_likeliest

    rejection.forward = sample_with_named_rows


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
