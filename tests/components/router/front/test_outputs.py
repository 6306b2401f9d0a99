"""What the router relies on in vLLM's output processor: a request that ends early leaves nothing in its tables."""

from __future__ import annotations

from copy import copy

import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest


def added(outputs: OutputProcessor, n: int, params: SamplingParams | None = None) -> EngineCoreRequest:
    """A request with its n sequences, as `router/front/engine_client.py` adds it."""
    if params is None:
        params = SamplingParams(n=n, temperature=0.7, detokenize=False, output_kind=RequestOutputKind.DELTA)
    request = EngineCoreRequest(
        request_id="cmpl-1-0-abc",
        external_req_id="cmpl-1-0",
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    collector = RequestOutputCollector(params.output_kind, request.request_id)
    if n == 1:
        outputs.add_request(request, None, None, 0, collector)
        return request
    parent = ParentRequest(request)
    for index in range(n):
        child = copy(request)
        child.request_id, child.sampling_params = parent.get_child_info(index)
        outputs.add_request(child, None, parent, index, collector)
    return request


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("aborted_before", [False, True])
def test_a_request_aborted_by_its_own_id_is_forgotten_with_all_its_sequences(n: int, aborted_before: bool):
    outputs = OutputProcessor(None, log_stats=False)
    request = added(outputs, n)
    assert len(outputs.request_states) == n
    if aborted_before:
        outputs.abort_requests(["cmpl-1-0"], internal=False)
    outputs.abort_requests([request.request_id], internal=True)
    assert outputs.request_states == {}
    assert outputs.parent_requests == {}
    assert not any(outputs.external_req_ids.values())
