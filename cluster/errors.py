"""Why a deployment does not start or go on. Apart from what raises it, which imports Ray."""

from __future__ import annotations


class ServingError(RuntimeError):
    """A deployment cannot start or go on; each sentence says why, with the fix if there is one."""

    def __init__(self, *sentences: str) -> None:
        super().__init__(*sentences)
        self.sentences = list(sentences)
