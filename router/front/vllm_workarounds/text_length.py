r"""Limits the length of texts to tokenise: a megabyte takes seconds of a core, whatever happens to the tokens.

vLLM refuses only what could not fit if every token were the longest of the vocabulary, which may have a hundred
characters, and checks no length if the text is only tokenised or will be cut. So one client's texts could keep the
router's cores busy for minutes. And its tokenizer takes half a surrogate pair (JSON's "\ud83d" alone, of a text that
was cut) for a value of the wrong type, and says so in words of its own.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.exceptions import VLLMValidationError

CHARACTERS_PER_TOKEN: Final = 16
"""Average over a whole prompt; ordinary text and code have three to five."""


def bound_texts(renderer: Any, max_model_len: int) -> None:
    """Make vLLM's renderer refuse longer texts with VLLMValidationError (400) before it tokenises them."""
    tokenize = renderer._tokenize_prompt_async
    most = CHARACTERS_PER_TOKEN * max_model_len

    async def bounded(prompt: Any, params: Any) -> Any:
        text = prompt["prompt"]
        characters = len(text)
        if characters > most:
            raise VLLMValidationError(
                f"the text has {characters} characters, and this server tokenises at most {most}: "
                f"{CHARACTERS_PER_TOKEN} for each of the {max_model_len} tokens of the model's context"
            )
        refuse_half_pairs(text, "the text")
        return await tokenize(prompt, params)

    renderer._tokenize_prompt_async = bounded


def refuse_half_pairs(text: str, name: str) -> None:
    """Raise VLLMValidationError (400) for a text that no message and no answer can carry."""
    try:
        text.encode()
    except UnicodeEncodeError as half:
        raise VLLMValidationError(
            f"{name} has half a surrogate pair, U+{ord(text[half.start]):04X}, which is no character: a client "
            "that cuts text must cut between characters"
        ) from half
