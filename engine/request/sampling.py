"""The SamplingParams of a request's two legs, derived from the client's."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import cast

import msgspec
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, SamplingParams

from ridgeline.contracts.errors import InvalidTask
from ridgeline.contracts.handoff import UNREADABLE

FORCED = "forced_token_ids"
"""Key in `extra_args` that `ridgeline.engine.request.forced_tokens` reads; clients cannot set it."""

TPOT_LIMIT = "tpot_limit_s"
"""Key in `extra_args` that `ridgeline.engine.step_scheduler` reads: `GenerateTask.tpot_limit_s`; clients cannot set
it."""
SURE_TOKENS = "sure_output_tokens"
"""The same for the tokens that this leg will most likely make at least."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SamplingParams)


def encode(params: SamplingParams) -> bytes:
    """Encode for `GenerateTask.sampling`. Raises InvalidTask for values that no message can carry."""
    return packed(params, "sampling parameters")


def packed(value: object, name: str) -> bytes:
    """Encode any value.

    Raises InvalidTask for what msgpack cannot carry: JSON has larger numbers and lone surrogates.
    """
    try:
        return _encoder.encode(value)
    except (OverflowError, UnicodeEncodeError, TypeError, RecursionError) as error:
        raise InvalidTask(f"{name} cannot be sent to a worker: {error}") from error


def decode(data: bytes) -> SamplingParams:
    """Decode what `encode` produced. Raises InvalidTask on anything else."""
    try:
        return cast(SamplingParams, _decoder.decode(data))
    except (*UNREADABLE, VLLMClientError) as error:
        raise InvalidTask(f"unreadable sampling parameters: {error}") from error


def resample_reason(params: SamplingParams) -> str | None:
    """Return why decode must sample the first token itself; None if it can continue from the one prefill sampled.

    Decode sees prefill's token as part of its prompt. That is wrong where sampling depends on the tokens produced so
    far: penalties on output tokens, grammars, banned sequences, repetition detection, custom processors, and a seeded
    generator, whose position in its stream would differ from a single engine's.
    """
    reasons = {
        "structured_output": params.structured_outputs is not None,
        "presence_penalty": params.presence_penalty != 0.0,
        "frequency_penalty": params.frequency_penalty != 0.0,
        "bad_words": bool(params.bad_words),
        "seed": params.seed is not None and params.temperature > 0.0,
        "thinking_budget": getattr(params, "thinking_token_budget", None) is not None,
        "repetition_detection": getattr(params, "repetition_detection", None) is not None,
        "watermarking": bool(getattr(params, "watermarking", None)),
    }
    return next((name for name, present in reasons.items() if present), None)


def without_client_transfer_keys(params: SamplingParams) -> SamplingParams:
    """Return the parameters without what a client put into `kv_transfer_params` or `vllm_xargs`.

    These could name hosts, ports and other clients' KV.
    """
    if params.extra_args is None:
        return params
    cleaned = copy(params)
    cleaned.extra_args = None
    return cleaned


def _for_engine(params: SamplingParams) -> SamplingParams:
    """Return a copy that takes and returns tokens only: the router does text, stop strings, aggregation."""
    leg = copy(params)
    leg.detokenize = False
    leg.stop = []
    leg.n = 1
    leg.output_kind = RequestOutputKind.DELTA
    leg.stream_interval = None  # stop strings must be seen at once, and a lost worker must not lose unsent tokens
    leg.skip_clone = True
    leg.extra_args = None
    return leg


def _without_prompt_logprobs(leg: SamplingParams) -> None:
    """Do not ask this leg for the prompt's log-probabilities: the client has them, or gets them from the other leg.

    When they are requested vLLM sets a second field, which stops it from reading any existing KV. If that were copied
    along, the transferred KV would be thrown away.
    """
    leg.prompt_logprobs = None
    leg.prompt_logprob_token_ids = None
    leg.skip_reading_prefix_cache = False


def prefill_leg(params: SamplingParams, *, emitted_token_ids: Sequence[int], resample: bool) -> SamplingParams:
    """Return the parameters of a prefill leg: one token.

    In resample mode that token is thrown away, so nothing may end the request before the hand-off. `emitted_token_ids`
    is what the client already has.
    """
    leg = _for_engine(params)
    leg.max_tokens = 1
    leg.min_tokens = min(max(0, params.min_tokens - len(emitted_token_ids)), 1)
    if emitted_token_ids:
        _without_prompt_logprobs(leg)  # the client got them with the first token
    if resample:
        leg.structured_outputs = None
        leg.bad_words = None
        leg.min_tokens = 0
        leg.ignore_eos = True
        leg.stop_token_ids = []
        leg._eos_token_id = None
        leg._all_stop_token_ids = set()
        leg.logprobs = None
    return leg


def decode_leg(
    params: SamplingParams, *, emitted_token_ids: Sequence[int], has_handoff: bool, repeats: bool = False
) -> SamplingParams:
    """Return the parameters for what is left after `emitted_token_ids`.

    The engine gets those tokens as part of its prompt, or with `repeats` produces them once more. With a hand-off the
    prompt's log-probabilities come from prefill.
    """
    leg = _for_engine(params)
    if has_handoff or emitted_token_ids:
        _without_prompt_logprobs(leg)
    emitted = 0 if repeats else len(emitted_token_ids)
    if params.max_tokens is not None:
        leg.max_tokens = params.max_tokens - emitted
    leg.min_tokens = max(0, params.min_tokens - emitted)
    if emitted and params.seed is not None:
        leg.seed = params.seed + emitted
    return leg


def with_transfer(leg: SamplingParams, transfer: dict[str, object]) -> SamplingParams:
    """Attach the connector's instructions; `leg` must be one of the copies made above."""
    leg.extra_args = {**(leg.extra_args or {}), "kv_transfer_params": transfer}
    return leg


def with_forced_tokens(leg: SamplingParams, token_ids: list[int]) -> SamplingParams:
    """Make the engine produce these tokens first; `leg` must be one of the copies made above."""
    leg.extra_args = {**(leg.extra_args or {}), FORCED: token_ids}
    return leg


def with_tpot_limit(leg: SamplingParams, limit_s: float, sure_tokens: float) -> SamplingParams:
    """Limit the time per output token of a leg that will most likely make so many.

    `leg` must be one of the copies made above.
    """
    leg.extra_args = {**(leg.extra_args or {}), TPOT_LIMIT: limit_s, SURE_TOKENS: sure_tokens}
    return leg
