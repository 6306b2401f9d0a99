"""The errors of this package; each names the value at fault and what would be valid.

They are `ValueError`s because each is caused by an argument: a config, a model name or a hardware name. They are raised
by `ridgeline.roofline.hf_config`, `ridgeline.roofline.model_shape`, `ridgeline.roofline.quantisation` and
`ridgeline.roofline.hardware`; the `ridgeline` command prints the message as it is.
"""

from collections.abc import Iterable


class RooflineError(ValueError):
    """Base class of the errors below: there is no roofline for this model or hardware."""


class ModelConfigError(RooflineError):
    """A Hugging Face config cannot be turned into a shape; `key` names the entry at fault."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(key, problem)
        self.key = key
        self.problem = problem

    def __str__(self) -> str:
        return f"model config: {self.key!r} {self.problem}"


class UnknownNameError(RooflineError):
    """A name is not in a built-in table; `valid_names` lists those that are."""

    def __init__(self, kind: str, name: str, valid_names: Iterable[str]) -> None:
        self.kind = kind
        self.name = name
        self.valid_names = tuple(sorted(valid_names))
        super().__init__(kind, name, self.valid_names)

    def __str__(self) -> str:
        return f"unknown {self.kind} {self.name!r}; valid names: {', '.join(self.valid_names)}"
