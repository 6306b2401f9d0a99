"""Makes seeded requests work on CPU when their prompt takes several engine steps.

vLLM samples for every sequence of a step, even if its prompt is not complete yet. It throws that token away and winds
the sequence's random generator back by an offset that only GPU generators have. On CPU this raises an error, which ends
the engine, so any seeded request with a prompt longer than a step did. Here the generator's state is restored instead.

Installed in each rank, before the first request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def put_generators_back(runner: Any) -> None:
    """Change this model runner if it runs on CPU; `runner` is vLLM's GPUModelRunner or a subclass."""
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
