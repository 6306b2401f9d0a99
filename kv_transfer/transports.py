"""The transports by their names in configuration, and how to build them. Used by `kv_transfer.service`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from contracts.handoff import KvLayout
from contracts.rpc.tls import TlsFiles
from kv_transfer.fetch.fetcher import KvFetcher
from kv_transfer.interfaces import KvSource, Puller, SourceControl
from kv_transfer.memory.blocks import BlockPool
from kv_transfer.names import AS_THEY_ARE, AUTO, TRANSPORT_NAMES, TransportName, WireDtype
from kv_transfer.source.lease import LeaseTable
from kv_transfer.testing.faults import FaultPlan, FaultyPuller
from kv_transfer.wire.frames import largest_frame_bytes


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
    wire_dtype: WireDtype = "none"
    """The encoding this engine asks for where blocks are put in frames; as a source it encodes as it is asked to."""
    offers: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    faults: FaultPlan | None = None
    """For tests only: makes this engine's fetches fail as planned."""
    tls: TlsFiles | None = None
    """The certificates for all connections between processes; None: plain text."""


def make_transport(name: TransportName, settings: TransportSettings) -> tuple[KvSource, KvFetcher]:
    """Build both ends. A transport is imported only when it is asked for.

    Raises ValueError for an unknown name, and for settings that this transport or these blocks do not support.
    Every source but `memory` serves all transports; the name decides what this engine's own fetches use.
    """
    if name not in TRANSPORT_NAMES:
        raise ValueError(f"unknown KV transport {name!r}; there are {', '.join(TRANSPORT_NAMES)}")
    if name in AS_THEY_ARE and settings.wire_dtype != "none":
        raise ValueError(f"{name} copies blocks as they are: wire_dtype must be none, not {settings.wire_dtype}")
    if name == "collective" and settings.tls is not None:
        raise ValueError("collective moves bytes in plain text and does not work with TLS")
    source, control, pullers = _memory(settings) if name == "memory" else _grpc(settings)
    if settings.faults is not None:
        pullers = [FaultyPuller(puller, settings.faults) for puller in pullers]
    return source, KvFetcher(
        settings.layout,
        control,
        pullers,
        allowed=AUTO if name == "auto" else (name,),
        rank=settings.rank,
        fetch_deadline_s=settings.fetch_deadline_s,
        wire_dtype=settings.wire_dtype,
    )


def _memory(settings: TransportSettings) -> tuple[KvSource, SourceControl, list[Puller]]:
    from kv_transfer.testing.memory_transport import MemoryControl, MemoryKvSource, MemoryPuller

    source = MemoryKvSource(settings.pool, settings.leases, settings.layout)
    return source, MemoryControl(), [MemoryPuller()]


def _grpc(settings: TransportSettings) -> tuple[KvSource, SourceControl, list[Puller]]:
    from kv_transfer.collective.puller import CollectivePuller
    from kv_transfer.collective.source import CollectiveSource
    from kv_transfer.fetch.control import GrpcControl
    from kv_transfer.fetch.grpc_puller import GrpcPuller
    from kv_transfer.fetch.shm_puller import ShmPuller
    from kv_transfer.source.grpc_source import GrpcKvSource, SourceExtension

    tls = settings.tls
    control = GrpcControl(largest_frame_bytes(settings.layout), tls)
    extensions: list[SourceExtension] = []
    pullers: list[Puller] = [ShmPuller(control), GrpcPuller(control)]
    if tls is None:  # torch.distributed sends its bytes in plain text
        extensions.append(CollectiveSource(settings.pool, settings.host))
        pullers.insert(1, CollectivePuller(control, settings.pool.device, settings.host))
    source = GrpcKvSource(
        settings.pool,
        settings.leases,
        settings.layout,
        settings.host,
        settings.port,
        settings.offers,
        extensions=extensions,
        tls=tls,
    )
    return source, control, pullers
