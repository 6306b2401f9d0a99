"""A tokenizer of words for the formats that hold texts."""

from types import SimpleNamespace

import pytest

from ridgeline.loadtest.trace.reading import sharegpt


@pytest.fixture(autouse=True)
def tokenised(monkeypatch) -> list[str]:
    """Make each word a token; return the texts that were tokenised."""
    seen: list[str] = []

    def encode(texts, **_):
        seen.extend(texts)
        return [SimpleNamespace(ids=text.split()) for text in texts]

    monkeypatch.setattr(sharegpt, "load_tokenizer", lambda _: SimpleNamespace(encode_batch=encode))
    return seen
