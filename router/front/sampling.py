"""What a client asked vLLM's API for, as the router's core and its messages carry it."""

from __future__ import annotations

from vllm.sampling_params import SamplingParams

from engine.request import sampling
from router.dispatch.request import Sampling


def sampling_of(params: SamplingParams) -> Sampling:
    """Encode them, and tell what dispatch has to know. Raises InvalidTask for values that no message can carry."""
    return Sampling(
        encoded=sampling.encode(params),
        max_tokens=params.max_tokens or 0,
        resample_reason=sampling.resample_reason(params),
    )
