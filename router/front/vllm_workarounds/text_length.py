"""Limits the length of texts to tokenise: a megabyte takes seconds of a core, whatever happens to the tokens.

vLLM refuses only what could not fit if every token were the longest of the vocabulary, which may have a hundred
characters, and checks no length if the text is only tokenised or will be cut. So one client's texts could keep the
router's cores busy for minutes. Installed by `router.front.engine_client`.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.exceptions import VLLMValidationError

CHARACTERS_PER_TOKEN: Final = 16
"""Average over a whole prompt; ordinary text and code have three to five."""


def bound_texts(renderer: Any, max_model_len_tokens: int) -> None:
    """Make vLLM's renderer refuse longer texts with VLLMValidationError (400) before it tokenises them."""
    tokenize = renderer._tokenize_prompt_async
    most = CHARACTERS_PER_TOKEN * max_model_len_tokens

    async def bounded(prompt: Any, params: Any) -> Any:
        characters = len(prompt["prompt"])
        if characters > most:
            raise VLLMValidationError(
                f"the text has {characters} characters, and this server tokenises at most {most}: "
                f"{CHARACTERS_PER_TOKEN} for each of the {max_model_len_tokens} tokens of the model's context"
            )
        return await tokenize(prompt, params)

    renderer._tokenize_prompt_async = bounded
