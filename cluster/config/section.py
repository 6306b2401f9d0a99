"""What all sections of the configuration have in common."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from ridgeline.contracts.former_names import warn_of_former_name


class Section(BaseModel):
    """Settings that cannot be changed once they are read, and that have no others beside them."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    FORMER_NAMES: ClassVar[Mapping[str, str]] = {}
    """The present name of each setting that was renamed in this version."""

    @model_validator(mode="before")
    @classmethod
    def _with_present_names(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not cls.FORMER_NAMES.keys() & values.keys():
            return values
        for former, present in cls.FORMER_NAMES.items():
            if former in values:
                warn_of_former_name(former, present)
        return {cls.FORMER_NAMES.get(name, name): value for name, value in values.items()}
