"""Prompts of real English, exact to the token where the served model's tokenizer is at hand.

Prompts are windows of one shipped text, tokenised with that tokenizer, and are sent as token ids or as text. Without it
`TextParts` stand in for tokens, and prompts can be sent as text only. Each window has an ordinal, and no two ordinals
begin alike, so a prefix cache hits only where the trace says it should.
"""

import functools
import itertools
import re
from pathlib import Path

import numpy as np
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError
from tokenizers import Tokenizer

from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.trace.trace import Trace, TraceRow

TEXT_FILE = Path(__file__).parents[1] / "data" / "opticks.txt"
TOKENIZER_FILE = "tokenizer.json"
PART = re.compile(r"\s?[^\W\d_]{1,7}|\s?\d|\s?[^\w\s]|\s+|_")
"""Seven letters of a word at most, a digit or a sign. Of these a text has nearly as many as tokens, whatever it is."""
SAMPLE_PARTS, SAMPLES = 500, 20


@functools.lru_cache(maxsize=4)
def load_text_tokens(tokenizer: str) -> tuple[int, ...]:
    """Tokenise the shipped text with the tokenizer at this path or hub name; takes about a second, once per process.

    Raises LoadTestError if the tokenizer cannot be loaded.
    """
    return tuple(load_tokenizer(tokenizer).encode(_text(), add_special_tokens=False).ids)


def prompt_text(tokenizer: str, prompt: list[int], most_tokens: int) -> str:
    """Return the beginning of a prompt as text of at most so many tokens, or of one. Raises LoadTestError.

    A text is counted again, since its tokens may be others than those that it was made of.
    """
    loaded, kept, excess = load_tokenizer(tokenizer), len(prompt), len(prompt) - most_tokens
    while True:
        kept = max(1, kept - excess)
        text = loaded.decode(prompt[:kept], skip_special_tokens=False)
        excess = len(loaded.encode(text, add_special_tokens=False).ids) - most_tokens
        if excess <= 0 or kept == 1:
            return text


def load_tokenizer(tokenizer: str) -> Tokenizer:
    """Load tokenizer.json from this folder, or from the hub's repository of this name. Raises LoadTestError."""
    found = _found_tokenizer(tokenizer)
    if isinstance(found, LoadTestError):
        raise found
    return found


@functools.lru_cache(maxsize=4)  # also of what cannot be found: where there is no network, the hub is tried for 24 s
def _found_tokenizer(tokenizer: str) -> Tokenizer | LoadTestError:
    try:
        loaded = Tokenizer.from_file(str(_tokenizer_file(tokenizer)))
    except Exception as error:  # noqa: BLE001 - the library raises this very class for a file that it cannot read
        reason = str(error).splitlines()[0]
        return LoadTestError(
            f"the tokenizer '{tokenizer}' cannot be loaded ({reason}): pass --tokenizer PATH, a folder with the "
            f"model's {TOKENIZER_FILE}, or --text-prompts without it"
        )
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def _tokenizer_file(tokenizer: str) -> Path:
    """Return the file of a folder, or of a hub name, which is downloaded unless it was before. Raises OSError."""
    folder = Path(tokenizer).expanduser()
    if folder.is_dir():
        if not (file := folder / TOKENIZER_FILE).is_file():
            raise FileNotFoundError(f"the folder has no {TOKENIZER_FILE}")
        return file
    try:
        return Path(hf_hub_download(tokenizer, TOKENIZER_FILE, local_files_only=True))
    except LocalEntryNotFoundError:
        return Path(hf_hub_download(tokenizer, TOKENIZER_FILE))


def is_at_hand(tokenizer: str | None) -> bool:
    """Return whether there is such a tokenizer, which may be looked for on the hub."""
    return tokenizer is not None and not isinstance(_found_tokenizer(tokenizer), LoadTestError)


@functools.cache
def _text() -> str:
    return TEXT_FILE.read_text(encoding="utf-8")


def sample_text(parts: int) -> str:
    """Return about so many parts from all over the text, which a server counts to tell how many tokens a part has."""
    found, length = PART.findall(_text()), -(-parts // SAMPLES)
    return "".join("".join(found[len(found) * place // SAMPLES :][:length]) for place in range(min(parts, SAMPLES)))


class TextParts:
    """The shipped text in pieces of about one token each, for a server that has so many tokens for a `PART`.

    For SmolLM2 a prompt of 200 tokens is right within 15 %, one of 2,000 within 6 %.
    """

    def __init__(self, tokens_per_part: float) -> None:
        ends = [0, *(match.end() for match in PART.finditer(_text()))]
        cuts = np.interp(np.arange(0, len(ends) - 1, 1 / tokens_per_part), np.arange(len(ends)), ends)
        numbers: dict[str, int] = {}
        self.ids = tuple(
            numbers.setdefault(_text()[begin:end], len(numbers))
            for begin, end in itertools.pairwise(np.unique(cuts.astype(np.intp)).tolist())
        )
        """The text as the numbers of its pieces, which are those of a tokenizer to `TextWindows`."""
        self._pieces = tuple(numbers)

    def text(self, prompt: list[int], most_pieces: int) -> str:
        """Return the beginning of a prompt as text, of at most so many pieces, or of one."""
        return "".join(self._pieces[number] for number in prompt[: max(1, most_pieces)])


@functools.lru_cache(maxsize=4)
def text_parts(tokens_per_part: float) -> TextParts:
    """Return the pieces for such a server; takes a third of a second, once per process."""
    return TextParts(tokens_per_part)


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
