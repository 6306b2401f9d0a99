"""Which transports exist, by the name used in configuration. `TransferService` asks here."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.base import KvFetcher, KvSource
from kv_transfer.blocks import BlockPool
from kv_transfer.handoff import KvLayout
from kv_transfer.lease import LeaseTable


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """What every transport is built from."""

    pool: BlockPool
    leases: LeaseTable
    layout: KvLayout
    host: str
    port: int
    fetch_deadline_s: float


def make_transport(name: str, settings: TransportSettings) -> tuple[KvSource, KvFetcher]:
    """Build both ends; raises ValueError for an unknown name. Transports are imported only when asked for."""
    if name == "grpc":
        from kv_transfer.grpc_fetcher import GrpcKvFetcher
        from kv_transfer.grpc_source import GrpcKvSource

        return (
            GrpcKvSource(settings.pool, settings.leases, settings.layout, settings.host, settings.port),
            GrpcKvFetcher(settings.layout, fetch_deadline_s=settings.fetch_deadline_s),
        )
    if name == "memory":
        from kv_transfer.memory_transport import MemoryKvFetcher, MemoryKvSource

        return MemoryKvSource(settings.pool, settings.leases, settings.layout), MemoryKvFetcher(settings.layout)
    raise ValueError(f"unknown KV transport {name!r}; there are 'grpc' and 'memory'")
