"""Speculation: which forms of `speculative_config` can be served, and what they take away from requests.

vLLM drafts tokens and verifies them in the next step, so a step makes several tokens of a sequence. An n-gram draft is
looked up in the sequence itself and keeps no KV, so one pool may have it alone. A draft model, an EAGLE head and the
MTP layers of a model have layers in the KV cache, which travel with the prompt's, so all pools need the same ones. The
hidden states that EAGLE and MTP read do not travel: the decode engine's first step makes those of its own token.

vLLM is not imported, so that a wrong configuration is reported at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

ARGUMENT: Final = "speculative_config"
WITHOUT_KV: Final = "ngram"
OF_ITS_OWN: Final = ("draft_model", "eagle", "eagle3")
"""The methods whose layers are another checkpoint's."""
_ALL: Final = ("method", "num_speculative_tokens")
KEYS: Final = {
    WITHOUT_KV: (*_ALL, "prompt_lookup_max", "prompt_lookup_min"),
    **dict.fromkeys(OF_ITS_OWN, (*_ALL, "model", "revision", "quantization", "draft_tensor_parallel_size")),
    "mtp": _ALL,
}
"""The methods, and what may be set of each: others of vLLM's keys change which tokens are accepted, or have not run."""
_COUNTS: Final = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "draft_tensor_parallel_size")


def problems(setting: str, config: Mapping[str, Any] | None, *, one_pool: bool) -> Iterator[str]:
    """Yield a sentence for each reason why engines, or only those of `one_pool`, cannot speculate like this."""
    if config is None:
        return
    method = config.get("method")
    if not isinstance(method, str) or method not in KEYS:
        yield f"{setting}.method must be one of {', '.join(KEYS)}, not {method!r}: other methods have not run."
        return
    for key in config:
        if key not in KEYS[method]:
            yield f"{setting}.{key} cannot be passed on: method {method} takes {', '.join(KEYS[method])}."
    counts = {name: config.get(name) for name in _COUNTS if name in config or name == "num_speculative_tokens"}
    wrong = {name: count for name, count in counts.items() if type(count) is not int or count < 1}
    for name, count in wrong.items():
        yield f"{setting}.{name} must be a whole number, 1 or more, not {count!r}."
    shortest, longest = config.get("prompt_lookup_min"), config.get("prompt_lookup_max")
    if not wrong and shortest and longest and shortest > longest:
        yield f"{setting}.prompt_lookup_min ({shortest}) must be at most prompt_lookup_max ({longest})."
    if method in OF_ITS_OWN and not (isinstance(model := config.get("model"), str) and model):
        yield f"{setting}.model must name what drafts, a folder or a name on the hub."
    if method != WITHOUT_KV and one_pool:
        yield (
            f"{setting} drafts by layers whose KV travels with the prompt's, so that all pools need them: set "
            f"engine_args.{ARGUMENT} instead."
        )


def pool_problems(setting: str, config: Any, of_pool: Mapping[str, Any], *, hands_over_on_gpus: bool) -> Iterator[str]:
    """Yield a sentence for each reason why a pool cannot have the drafts of all pools, `config`, or others instead."""
    if not isinstance(config, Mapping) or config.get("method") == WITHOUT_KV:
        return
    if ARGUMENT in of_pool:
        yield f"{setting}.{ARGUMENT} replaces drafts whose KV travels, so that all pools need them: leave it out."
    if hands_over_on_gpus:  # vLLM's second model runner gives outputs out before it drafts
        yield (
            f"engine_args.{ARGUMENT}.method {config.get('method')} has not run on GPUs with a hand-off, which may come "
            f"before the drafts' KV is written: serve in mode colocated, or by method {WITHOUT_KV}."
        )


def speculates(engine_args: Mapping[str, Any]) -> bool:
    """Return whether engines with these arguments draft tokens.

    vLLM then takes no logits processors, ours included: such an engine cannot be made to repeat tokens, and refuses
    `min_p` and `logit_bias`.
    """
    return bool(engine_args.get(ARGUMENT))
