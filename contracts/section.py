"""What all sections of the configuration have in common, in whichever package they are defined."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter

GIB = 1024**3
MIB = 1024**2

_byte_size: TypeAdapter[ByteSize] = TypeAdapter(ByteSize)


def _parse_bytes(value: Any) -> Any:
    return int(_byte_size.validate_python(value)) if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(_parse_bytes)]
"""A number of bytes; text such as `1 GiB` or `500 MB` is accepted too."""


def _custom_only(resources: dict[str, float]) -> dict[str, float]:
    for name, number in resources.items():
        if name in _RAYS_OWN or not name:
            raise ValueError(
                f"{name!r} is no custom resource: set cores_per_worker and gpus_per_worker of a pool instead"
            )
        if number > 1 and not number.is_integer():
            raise ValueError(f"{name}: Ray takes parts of one and whole numbers, not {number:g}")
    return resources


_RAYS_OWN = ("CPU", "GPU", "memory", "object_store_memory")
Resources = Annotated[dict[str, Annotated[float, Field(gt=0)]], AfterValidator(_custom_only)]
"""Custom resources in Ray, and how much of each is taken."""


class Section(BaseModel):
    """Settings that cannot be changed once they are read, and that have no others beside them."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
