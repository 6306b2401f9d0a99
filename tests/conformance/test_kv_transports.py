"""Each transport against the conformance suite."""

import pytest
from check_transport import FrameConformance, TransportConformance, slow_copies, slow_frames, slow_gathers

from kv_transfer.transports import make_transport


class Harness:
    def __init__(self, name, slow_down):
        self._name = name
        self.slow_down = slow_down

    def make(self, settings):
        return make_transport(self._name, settings)


class TestMemory(FrameConformance, TransportConformance):
    @pytest.fixture
    def harness(self):
        return Harness("memory", slow_frames)

    def restarted(self, harness, node):
        pytest.skip("an address in this process is never used again")


class TestGrpc(FrameConformance, TransportConformance):
    @pytest.fixture
    def harness(self):
        return Harness("grpc", slow_frames)


class TestShm(TransportConformance):
    @pytest.fixture
    def harness(self):
        return Harness("shm", slow_copies)


class TestCollective(TransportConformance):
    """Over gloo: the pool is in host memory."""

    @pytest.fixture
    def harness(self):
        return Harness("collective", slow_gathers)


class TestAuto(TransportConformance):
    """On one host it is shm."""

    @pytest.fixture
    def harness(self):
        return Harness("auto", slow_copies)
