"""Speculation: which forms of `speculative_config` can be served, and what they take away from requests.

vLLM drafts tokens and verifies them in the next step, so a step makes several tokens of a sequence. An n-gram draft is
looked up in the sequence itself and keeps no KV, so one pool may have it alone. A draft model has layers in the KV
cache, which travel with the prompt's, so all pools need the same one.

vLLM is not imported, so that a wrong configuration is reported at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

ARGUMENT: Final = "speculative_config"
WITHOUT_KV: Final = "ngram"
WITH_KV: Final = "draft_model"
KEYS: Final = {
    WITHOUT_KV: ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"),
    WITH_KV: (
        *("method", "num_speculative_tokens", "model", "revision", "quantization", "draft_tensor_parallel_size"),
    ),
}
"""The methods, and what may be set of each: others of vLLM's keys change which tokens are accepted, or have not run."""


def problems(setting: str, config: Mapping[str, Any] | None, *, one_pool: bool) -> Iterator[str]:
    """Yield a sentence for each reason why engines, or only those of `one_pool`, cannot speculate like this."""
    if config is None:
        return
    method = config.get("method")
    if method not in KEYS:
        yield (
            f"{setting}.method must be {WITHOUT_KV} or {WITH_KV}, not {method!r}: drafts of EAGLE, MTP and Medusa read "
            "hidden states of the model, which do not travel with its KV, and other methods have not run."
        )
        return
    for key in config:
        if key not in KEYS[method]:
            yield f"{setting}.{key} cannot be passed on: method {method} takes {', '.join(KEYS[method])}."
    tokens = config.get("num_speculative_tokens")
    if not isinstance(tokens, int) or tokens < 1:
        yield f"{setting}.num_speculative_tokens must be the number of tokens to draft, 1 or more, not {tokens!r}."
    if method == WITH_KV and not config.get("model"):
        yield f"{setting}.model must name the draft model, a folder or a name on the hub."
    if method == WITH_KV and one_pool:
        yield (
            f"{setting} has a draft model, whose KV travels with the prompt's, so that all pools need it: set "
            f"engine_args.{ARGUMENT} instead."
        )


def speculates(engine_args: Mapping[str, Any]) -> bool:
    """Return whether engines with these arguments draft tokens.

    vLLM then takes no logits processors, ours included: such an engine cannot be made to repeat tokens, and refuses
    `min_p` and `logit_bias`.
    """
    return bool(engine_args.get(ARGUMENT))
