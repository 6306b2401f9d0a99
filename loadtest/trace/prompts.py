"""Token-exact prompts of real English.

Prompts are windows of one shipped text, tokenised with the served model's tokenizer, and are sent as token ids. Each
window has an ordinal, and no two ordinals begin alike, so a prefix cache hits only where the trace says it should.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.trace.trace import Trace, TraceRow

TEXT_FILE = Path(__file__).parents[1] / "data" / "opticks.txt"


@functools.lru_cache(maxsize=4)
def load_text_tokens(tokenizer: str) -> tuple[int, ...]:
    """Tokenise the shipped text with the tokenizer at this path or hub name; takes about a second, once per process.

    Raises LoadTestError if the tokenizer cannot be loaded.
    """
    text = TEXT_FILE.read_text(encoding="utf-8")
    return tuple(load_tokenizer(tokenizer)(text, add_special_tokens=False, verbose=False)["input_ids"])


def prompt_text(tokenizer: str, prompt: list[int], most_tokens: int) -> str:
    """Return the beginning of a prompt as text of at most so many tokens, or of one. Raises LoadTestError.

    A text is counted again, since its tokens may be others than those that it was made of.
    """
    loaded, kept, excess = load_tokenizer(tokenizer), len(prompt), len(prompt) - most_tokens
    while True:
        kept = max(1, kept - excess)
        text = str(loaded.decode(prompt[:kept]))
        excess = len(loaded(text, add_special_tokens=False, verbose=False)["input_ids"]) - most_tokens
        if excess <= 0 or kept == 1:
            return text


@functools.lru_cache(maxsize=4)
def load_tokenizer(tokenizer: str) -> Any:
    """Load the tokenizer at this path or hub name. Raises LoadTestError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise LoadTestError(
            f"the tokenizer '{tokenizer}' cannot be loaded ({reason}): pass --tokenizer PATH, the served model's folder"
        ) from error


class TextWindows:
    """Endless distinct windows of a token sequence; `window(ordinal, tokens)` is a pure function of its arguments."""

    def __init__(self, tokens: tuple[int, ...], seed: int) -> None:
        self._tokens = np.asarray(tokens, dtype=np.int64)
        self._digits = tuple(dict.fromkeys(tokens))
        self._starts = np.random.default_rng(seed).permutation(len(tokens))

    def window(self, ordinal: int, tokens: int) -> list[int]:
        """Return exactly `tokens` ids. Each start position is used once per lap."""
        lap, turn = divmod(ordinal, len(self._starts))
        lead = self._lead(lap)[:tokens]
        positions = np.arange(self._starts[turn], self._starts[turn] + tokens - len(lead))
        body: list[int] = self._tokens.take(positions, mode="wrap").tolist()
        return lead + body

    def _lead(self, lap: int) -> list[int]:
        """Return what tells a lap from the others: the first token twice, then the lap in two digits.

        Four tokens, however large the ordinal is, so that even blocks of 16 tokens do not begin alike.
        """
        if lap == 0:
            return []
        high, low = divmod(lap, len(self._digits))
        return [self._digits[0], self._digits[0], self._digits[high % len(self._digits)], self._digits[low]]


class PromptMaker:
    """Makes the prompts of one trace. Rounds use disjoint windows, so that each meets a cold prefix cache.

    Rounds of different traces are disjoint too if all are given the same `ordinals_per_round`, enough for any of them.
    """

    def __init__(
        self, windows: TextWindows, trace: Trace, warmup_requests: int, ordinals_per_round: int | None = None
    ) -> None:
        most_id = max((max(row.prefix_ids, default=0) for row in trace.rows), default=0)
        self._windows = windows
        self._trace = trace
        self._shared_ids = most_id + 1 if any(row.prefix_ids for row in trace.rows) else 0
        self._round_ordinals = ordinals_per_round or self._shared_ids + len(trace.rows) + warmup_requests

    def prompt(self, index: int, round_index: int) -> list[int]:
        """Return the prompt of the trace's row `index`: that of the row it continues, then shared blocks, then its own.

        Each row has a window of its own, for what it adds and for its answer, so rows that continue one row differ from
        there on. An answer is text of the window: what a model will say is not known before.
        """
        base = round_index * self._round_ordinals
        turns: list[int] = []
        at: int | None = index
        while at is not None:
            turns.append(at)
            at = self._trace.rows[at].continues
        prompt: list[int] = []
        for turn in reversed(turns):
            row = self._trace.rows[turn]
            blocks = self._shared_blocks(row, base, row.input_tokens - len(prompt))
            own_tokens = row.input_tokens + row.output_tokens - len(prompt) - len(blocks)
            prompt += blocks + self._windows.window(base + self._shared_ids + turn, max(0, own_tokens))
        return prompt[: self._trace.rows[index].input_tokens]

    def warmup_prompt(self, number: int, round_index: int, tokens: int) -> list[int]:
        """Return a prompt whose beginning no request of any round shares."""
        ordinal = round_index * self._round_ordinals + self._shared_ids + len(self._trace.rows) + number
        return self._windows.window(ordinal, tokens)

    def _shared_blocks(self, row: TraceRow, base: int, most_tokens: int) -> list[int]:
        blocks: list[int] = []
        for prefix_id in row.prefix_ids:
            missing = most_tokens - len(blocks)
            if missing <= 0:
                break
            blocks += self._windows.window(base + prefix_id, min(self._trace.prefix_block_tokens, missing))
        return blocks
