"""What all sections of the configuration have in common, in whichever package they are defined."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, TypeAdapter, model_validator

from ridgeline.contracts.former_names import warn_of_former_name

GIB = 1024**3
MIB = 1024**2

_byte_size: TypeAdapter[ByteSize] = TypeAdapter(ByteSize)


def _parse_bytes(value: Any) -> Any:
    return int(_byte_size.validate_python(value)) if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(_parse_bytes)]
"""A number of bytes; text such as `1 GiB` or `500 MB` is accepted too."""


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
