"""Which transports exist, by the name used in configuration. `TransferService` asks here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from kv_transfer.base import KvSource, Puller, SourceControl
from kv_transfer.blocks import BlockPool
from kv_transfer.fetcher import KvFetcher
from kv_transfer.frames import largest_frame_bytes
from kv_transfer.handoff import KvLayout
from kv_transfer.lease import LeaseTable

TransportName = Literal["auto", "shm", "collective", "grpc", "memory"]
TRANSPORT_NAMES: Final = get_args(TransportName)
AUTO: Final = {"cpu": ("shm", "grpc"), "cuda": ("shm", "collective", "grpc")}
"""What `auto` tries with each source, best first, by where the pool lies."""


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """What both ends of every transport are built from."""

    pool: BlockPool
    leases: LeaseTable
    layout: KvLayout
    host: str
    port: int
    rank: int = 0
    fetch_deadline_s: float = 30.0
    offers: Mapping[str, dict[str, Any]] = field(default_factory=dict)


def make_transport(name: TransportName, settings: TransportSettings) -> tuple[KvSource, KvFetcher]:
    """Build both ends; raises ValueError for an unknown name. Transports are imported only when asked for.

    Every source but `memory` serves all transports; the name decides what this engine's own fetches use.
    """
    if name not in TRANSPORT_NAMES:
        raise ValueError(f"unknown KV transport {name!r}; there are {', '.join(TRANSPORT_NAMES)}")
    source, control, pullers = _memory(settings) if name == "memory" else _grpc(name, settings)
    return source, KvFetcher(
        settings.layout, control, pullers, rank=settings.rank, fetch_deadline_s=settings.fetch_deadline_s
    )


def _memory(settings: TransportSettings) -> tuple[KvSource, SourceControl, list[Puller]]:
    from kv_transfer.memory_transport import MemoryControl, MemoryKvSource, MemoryPuller

    source = MemoryKvSource(settings.pool, settings.leases, settings.layout)
    return source, MemoryControl(), [MemoryPuller()]


def _grpc(name: str, settings: TransportSettings) -> tuple[KvSource, SourceControl, list[Puller]]:
    from kv_transfer.collective_puller import CollectivePuller
    from kv_transfer.collective_source import CollectiveSource
    from kv_transfer.grpc_control import GrpcControl
    from kv_transfer.grpc_puller import GrpcPuller
    from kv_transfer.grpc_source import GrpcKvSource
    from kv_transfer.shm_puller import ShmPuller

    source = GrpcKvSource(
        settings.pool,
        settings.leases,
        settings.layout,
        settings.host,
        settings.port,
        settings.offers,
        extensions=[CollectiveSource(settings.pool, settings.host)],
    )
    control = GrpcControl(largest_frame_bytes(settings.layout))
    makers: dict[str, Callable[[], Puller]] = {
        "shm": lambda: ShmPuller(control),
        "collective": lambda: CollectivePuller(control, settings.pool.device, settings.host),
        "grpc": lambda: GrpcPuller(control),
    }
    wanted = AUTO[settings.pool.device.type] if name == "auto" else (name,)
    return source, control, [makers[each]() for each in wanted]
