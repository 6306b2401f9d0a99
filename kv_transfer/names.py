"""The names and limits of KV transfer that settings use. It imports nothing, so that the command line starts fast."""

from __future__ import annotations

from typing import Final, Literal, get_args

TransportName = Literal["auto", "shm", "cuda-ipc", "collective", "grpc", "nixl"]
TRANSPORT_NAMES: Final = get_args(TransportName)
AUTO: Final = ("cuda-ipc", "shm", "grpc")
"""The transports that `auto` tries with each source, best first; TLS covers each. The first is for engines on GPUs, and
there only for two on one GPU: between GPUs it has not run. The second is for engines on CPUs. Left out are
`collective`, which has not run with NCCL, and `nixl`, which is slower on one host and over TCP, and has run nowhere
else."""
NIXL_PACKAGES: Final = {"13": "nixl-cu13", "12": "nixl-cu12"}
"""The package that `nixl` needs, by the CUDA version of torch; without CUDA, the first."""

MAX_GROUPS: Final = 1024
"""Ranks that can fetch from one source by `collective`: with equal ranks, one of each worker of the largest pool that
may be ordered, 1000. Each has a thread of the source, made when it joins: 16 KiB and 0.2 ms."""
LONGEST_FETCH_S: Final = 600.0
"""Longest read that a source accepts: a read pins its blocks for as long as its call lives."""
LONGEST_FETCH_DEADLINE_S: Final = 590.0
"""Longest deadline that a fetch may set, below the limit so that no rounding exceeds it."""
