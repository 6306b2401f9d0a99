"""An engine's front end keeps the one tokenizer that it has loaded.

vLLM makes two copies of it for threads that render chats, before it starts the engine process. Here the router renders,
and the front end gets tokens: its tokenizer is used in the event loop alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import vllm.renderers.hf


@contextmanager
def one_tokenizer() -> Iterator[None]:
    """Have a front end that is made meanwhile copy no tokenizer."""
    with patch.object(vllm.renderers.hf, "maybe_make_thread_pool", _as_it_is):
        yield


def _as_it_is(tokenizer: Any, copies: int = 1) -> Any:
    return tokenizer
