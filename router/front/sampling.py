"""A client's sampling parameters in the form that dispatch and its messages carry."""

from __future__ import annotations

from vllm.sampling_params import SamplingParams

from ridgeline.engine.request import sampling
from ridgeline.router.dispatch.request import Sampling


def sampling_of(params: SamplingParams) -> Sampling:
    """Encode the parameters and extract what dispatch needs.

    Raises InvalidTask for values that no message can carry.
    """
    return Sampling(
        encoded=sampling.encode(params),
        max_tokens=params.max_tokens or 0,
        resample_reason=sampling.resample_reason(params),
        reads_cache=not params.skip_reading_prefix_cache,
    )
