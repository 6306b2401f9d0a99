"""Each transport against the conformance suite."""

import pytest
from check_transport import TransportConformance

from kv_transfer.grpc_fetcher import GrpcKvFetcher
from kv_transfer.grpc_source import GrpcKvSource
from kv_transfer.memory_transport import MemoryKvFetcher, MemoryKvSource


class MemoryHarness:
    def make_source(self, pool, leases, layout):
        return MemoryKvSource(pool, leases, layout)

    def make_fetcher(self, layout):
        return MemoryKvFetcher(layout)


class GrpcHarness:
    def make_source(self, pool, leases, layout):
        return GrpcKvSource(pool, leases, layout, "127.0.0.1")

    def make_fetcher(self, layout):
        return GrpcKvFetcher(layout, fetch_deadline_s=5.0)


class TestMemory(TransportConformance):
    @pytest.fixture
    def harness(self):
        return MemoryHarness()


class TestGrpc(TransportConformance):
    @pytest.fixture
    def harness(self):
        return GrpcHarness()
