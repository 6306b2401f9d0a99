"""NIXL is optional: what is said where it is missing, and that nothing loads it unless it is asked for."""

import subprocess
import sys

import pytest
import torch

from ridgeline.contracts.handoff import KvLayout
from ridgeline.kv_transfer.measure import MEASURABLE, MeasureSettings, measurable_here
from ridgeline.kv_transfer.memory.device import pool_of
from ridgeline.kv_transfer.names import AUTO
from ridgeline.kv_transfer.nixl import library
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.kv_transfer.transports import make_transport
from ridgeline.prefill_worker.kv_source.block_server import RankCache
from ridgeline.prefill_worker.kv_source.lease import LeaseTable
from tests.support.samples import kv_layout


@pytest.fixture
def missing(monkeypatch):
    monkeypatch.setattr(library, "_module", lambda: "nixl_that_is_not_there")
    library.load.cache_clear()
    yield
    library.load.cache_clear()


def cache() -> RankCache:
    layout: KvLayout = kv_layout(num_layers=1, block_bytes=32)
    return RankCache(pool_of([torch.zeros(4, 32, dtype=torch.uint8)]), LeaseTable(), layout)


def test_an_engine_that_asks_for_it_in_vain_is_told_what_to_install(missing):
    with pytest.raises(ValueError, match=r"not installed: run `pip install nixl-cu1[23]`"):
        make_transport(cache(), TransferOptions("127.0.0.1", transport="nixl"))


def test_a_measurement_leaves_it_out_unless_it_is_asked_for(missing):
    assert set(measurable_here()) == set(MEASURABLE) - {"nixl"}
    assert MeasureSettings().problems(1 << 40) == []
    (problem,) = MeasureSettings(transports=("nixl",)).problems(1 << 40)
    assert "transport 'nixl' cannot be measured: the package nixl-cu1" in problem


@pytest.mark.parametrize(
    ("cuda", "package"), [(None, "nixl-cu13"), ("12.8", "nixl-cu12"), ("13.0", "nixl-cu13"), ("14.1", "nixl-cu13")]
)
def test_the_package_is_that_of_torchs_cuda(monkeypatch, cuda, package):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert library.package() == package


LOADS_NOTHING = """
import sys, torch
from tests.unit.kv_transfer.nixl.test_library import cache
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.kv_transfer.transports import make_transport
make_transport(cache(), TransferOptions("127.0.0.1"))[0].close()
print([name for name in sys.modules if name.startswith("nixl")])
"""


def test_nothing_of_it_is_loaded_unless_it_is_configured():
    assert subprocess.check_output([sys.executable, "-c", LOADS_NOTHING], text=True).strip() == "[]"


def test_auto_does_not_pick_it():
    assert "nixl" not in AUTO, "it is slower on one host, and has run over nothing faster than TCP"
