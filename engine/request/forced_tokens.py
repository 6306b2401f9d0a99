"""Makes an engine repeat the output tokens that a client already has, before it continues by itself.

A stream continues on another worker after its own has died (request migration). Where sampling depends on the tokens
produced so far (grammars, penalties, a seeded generator: `sampling.resample_reason`), they cannot become part of the
prompt. So the new engine runs the request from its prompt and is given no choice for the first tokens. The grammar, the
penalty counts and the generator then end up where the lost engine's were. `ridgeline.engine.vllm_engine` names this
class among the logits processors, and vLLM loads it into the engine process.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from ridgeline.engine.request.sampling import FORCED


class ForcedTokens(LogitsProcessor):  # type: ignore[misc] # vLLM is untyped here
    """Sets all logits but one to minus infinity, for every row of the batch that still repeats."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[list[int], list[int]]] = {}
        """Row -> (tokens to repeat, tokens produced so far: vLLM's own list, which grows)."""

    def is_argmax_invariant(self) -> bool:
        """Return False: this processor decides the token."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Update the rows that repeat; vLLM calls it before every step."""
        process_dict_updates(self._rows, batch_update, _forced)
        for row in [row for row, (forced, output) in self._rows.items() if len(output) >= len(forced)]:
            del self._rows[row]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Change logits of shape (requests, vocabulary) in place."""
        for row, (forced, output) in self._rows.items():
            logits[row] = -torch.inf
            logits[row, forced[len(output)]] = 0.0
        return logits


def _forced(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> tuple[list[int], list[int]] | None:
    forced = (params.extra_args or {}).get(FORCED)
    return (forced, output) if forced else None
