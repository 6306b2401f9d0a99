"""What can be written in a configuration about KV transfer; imports nothing, so that a command line stays quick."""

from __future__ import annotations

from typing import Final, Literal, get_args

TransportName = Literal["auto", "shm", "collective", "grpc", "memory"]
TRANSPORT_NAMES: Final = get_args(TransportName)
AUTO: Final = ("shm", "grpc")
"""What `auto` tries with each source, best first. `collective` must be asked for: with nccl it has not run yet."""
AS_THEY_ARE: Final = ("shm", "collective")
"""Transports without frames, which a `wire_dtype` would not reach."""

LONGEST_FETCH_S: Final = 600.0
"""A read pins blocks for as long as its call lives, so a source refuses a call that may live longer."""
LONGEST_FETCH_DEADLINE_S: Final = 590.0
"""What a fetch may be given, so that no rounding on the way takes it over the limit."""

WireDtype = Literal["none", "int8", "fp8"]
WIRE_DTYPES: Final = get_args(WireDtype)
