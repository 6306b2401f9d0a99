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

    def __str__(self) -> str:
        return "model config: {!r} {}".format(*self.args)


class UnknownNameError(RooflineError):
    """A name is not in a built-in table; the message lists those that are."""

    def __init__(self, kind: str, name: str, valid_names: Iterable[str]) -> None:
        super().__init__(kind, name, sorted(valid_names))

    def __str__(self) -> str:
        kind, name, valid_names = self.args
        return f"unknown {kind} {name!r}; valid names: {', '.join(valid_names)}"
