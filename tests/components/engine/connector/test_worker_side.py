"""The connector's worker side over the real transfer service."""

import threading

import pytest
import torch

from ridgeline.contracts.handoff import KvHandoff, new_handoff_id
from ridgeline.engine.connector.messages import Fetch, Publish, StepInstructions
from ridgeline.engine.connector.worker_side import GPU_RANK_WAIT_S, RANK_WAIT_S, WorkerSide, warm_ups
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.kv_transfer.service import RankLayers, TransferStats
from tests.support.samples import kv_layout

NUM_BLOCKS = 24
COUNTS = {"kv_bytes_total.sent", "kv_bytes_total.received", "expired_leases_total"}


@pytest.fixture
def worker_side():
    layers = {f"layer{n}": torch.zeros(NUM_BLOCKS, 2, 4, 8, dtype=torch.uint8) for n in range(2)}
    layout = kv_layout(kv_dtype="auto", block_size=4, num_layers=2, block_bytes=64)
    news = threading.Event()
    side = WorkerSide(RankLayers(layers, layout), TransferOptions("127.0.0.1", transport="grpc"), news.set)
    side.news = news
    yield side
    side.shutdown()


def test_the_warm_up_is_counted_nowhere(worker_side):
    counted = worker_side.get_kv_connector_stats().data
    assert {name: counted[name] for name in COUNTS} == dict.fromkeys(COUNTS, 0)
    assert not [name for name in counted if name.startswith("fetches_total")]
    assert worker_side._service.stats().fetches_total == {"ok": 4}, "there was one"


def test_figures_since_a_moment_keep_what_is_open_and_subtract_what_grows():
    before = TransferStats(1, 2, 3, 4, 5, 100, 200, {"ok": 4, "timeout": 1})
    now = TransferStats(6, 7, 8, 9, 10, 150, 300, {"ok": 6, "timeout": 1, "busy": 2})
    assert now.since(before) == TransferStats(6, 7, 5, 9, 10, 50, 100, {"ok": 2, "busy": 2})


def test_nccl_is_not_warmed_up_because_it_refuses_one_gpu_as_both_ends():
    collective, auto = (TransferOptions(host="127.0.0.1", transport=name) for name in ("collective", "auto"))
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert [warm_ups(options, device) for options in (collective, auto) for device in (gpu, cpu)] == [
        (), (None,), (None, "grpc"), (None,),
    ]  # fmt: skip
    assert warm_ups(TransferOptions(host="127.0.0.1", faults="seed=1,drop=0.5"), cpu) == ()


def test_a_way_that_auto_does_not_pick_for_itself_is_warmed_up_too(worker_side):
    before = worker_side._service.stats()
    worker_side._warm_up("grpc")
    fetched = worker_side._service.stats().since(before)
    assert fetched.fetches_total.get("ok") == 4
    assert fetched.bytes_received_total == fetched.bytes_sent_total > 0


def test_a_step_that_may_not_wait_does_not_and_one_that_may_waits_its_time(worker_side, monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr(worker_side._service, "wait", waited.append)
    worker_side.get_transfer_results(may_wait=False)
    worker_side.get_transfer_results(may_wait=True)
    assert waited == [RANK_WAIT_S]
    assert GPU_RANK_WAIT_S <= 0.001


def test_the_end_of_a_lease_is_news(worker_side):
    handoff_id = new_handoff_id()
    worker_side.publish(Publish("sent", handoff_id, [1, 2, 3], 12))
    worker_side.news.clear()
    worker_side.release_own([handoff_id])
    assert worker_side.news.is_set()
    assert worker_side.get_transfer_results(may_wait=False).finished_sending == {"sent"}


def test_the_end_of_a_fetch_is_news_and_so_is_the_report_of_it(worker_side):
    handoff = KvHandoff(
        handoff_id=new_handoff_id(),  # never published, so that no end of a lease is in the way
        addresses=(worker_side.endpoint.address,),
        num_blocks=3,
        num_tokens=12,
        compatibility_hash=worker_side.layout.compatibility_hash(),
        lease_s=30.0,
        num_bytes=3 * worker_side.endpoint.block_bytes_all_layers,
    )
    worker_side.news.clear()
    worker_side.apply(StepInstructions(fetch=[Fetch("received", handoff, {0: [1, 2, 3]})], cancel=["received"]))
    assert worker_side.news.wait(20)
    worker_side.news.clear()
    assert worker_side.get_transfer_results(may_wait=False).finished_recving == {"received"}
    assert worker_side.news.is_set(), "the step loop may read this report only in its next step"
    worker_side.news.clear()
    worker_side.get_transfer_results(may_wait=False)
    assert not worker_side.news.is_set()
