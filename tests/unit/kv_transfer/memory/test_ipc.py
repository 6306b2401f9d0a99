"""What of an offer is checked before a cache is opened by it; with handles and a driver made up."""

from __future__ import annotations

import os
import secrets
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from ridgeline.kv_transfer.interfaces import UNSUPPORTED
from ridgeline.kv_transfer.memory import ipc
from ridgeline.kv_transfer.memory.blocks import CannotOpen
from ridgeline.kv_transfer.memory.ipc import (
    CannotExport,
    IpcExport,
    IpcOffer,
    OpenedPool,
    export,
    require_access,
)
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.kv_transfer.transports import exports, make_transport
from tests.support.cuda_handles import made_up_handles

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = (4, 64, 4096)


@pytest.fixture
def handles():
    with made_up_handles() as handles:
        yield handles


def exported_by_another_process(layers: list[torch.Tensor], /, **changes: Any) -> tuple[IpcExport, IpcOffer]:
    """What exports these layers, which must be kept, and the offer as it arrives."""
    exported = export(layers)
    offer = msgspec.convert(msgspec.to_builtins(exported.offer), IpcOffer)
    assert offer == exported.offer
    return exported, msgspec.structs.replace(offer, **{"pid": 1} | changes)


def a_cache() -> torch.Tensor:
    return torch.randint(0, 255, SHAPE, dtype=torch.uint8)


@pytest.mark.usefixtures("handles")
def test_what_is_opened_is_what_is_there_and_what_comes_there_later():
    cache = a_cache()
    _kept, offer = exported_by_another_process(list(cache))
    pool = OpenedPool(offer, CPU).pool
    for layer in (0, 3):
        cache[layer, 7] += 1
        assert bytes(pool.read(layer, [7])[0]) == cache[layer, 7].numpy().tobytes()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"host": "another/pid:[1]"}, "another host, or in another container"),
        ({"proof": secrets.token_bytes(64)}, "what is read of its memory is not what is there"),
        ({"layers": ((1, 0),)}, "memory that it does not offer"),
        ({"layers": ((-1, 0),)}, "memory that it does not offer"),
        ({"layers": ()}, "not of a KV cache"),
        ({"layers": ((0, -1),)}, "goes beyond its memory"),
        ({"layers": ((0, 3 * 64 * 4096 + 1),)}, "goes beyond its memory"),
        ({"num_blocks": 65, "layers": ((0, 3 * 64 * 4096),)}, "goes beyond its memory"),
        ({"block_stride_bytes": 4095}, "not of a KV cache"),
    ],
)
@pytest.mark.usefixtures("handles")
def test_an_offer_with_a_wrong_claim_is_not_opened(changes, sentence):
    _kept, offer = exported_by_another_process(list(a_cache()), **changes)
    with pytest.raises(CannotOpen, match=sentence):
        OpenedPool(offer, CPU)


def test_layers_without_a_gpu_are_not_exported_as_if_they_had_one():
    with pytest.raises(CannotExport, match="not on one GPU"):
        export([torch.zeros(8, 64)])


def test_why_a_cache_cannot_be_exported_takes_the_place_of_the_offer(monkeypatch):
    class OnGpu:
        device = GPU

    def cannot(_layers):
        raise CannotExport("CUDA does not export its KV cache")

    monkeypatch.setattr("ridgeline.kv_transfer.transports.export", cannot)
    made = exports([OnGpu()], None, "cuda-ipc")  # type: ignore[list-item]
    assert made[0] == {"cuda-ipc": {UNSUPPORTED: "CUDA does not export its KV cache"}}
    assert exports([OnGpu()], None, "auto") == made  # type: ignore[list-item]
    assert exports([OnGpu()], None, "grpc") == ({}, None), "nothing is asked of CUDA"  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("device", "transport", "names"),
    [
        (CPU, "auto", ["shm", "grpc"]),
        (GPU, "auto", ["cuda-ipc", "grpc"]),
        (CPU, "cuda-ipc", ["cuda-ipc"]),
        (GPU, "shm", ["shm"]),
    ],
)
def test_auto_tries_what_there_is_for_the_caches_device(device, transport, names):
    layout = SimpleNamespace(block_bytes=64, num_layers=1, kv_dtype="bfloat16")
    options = TransferOptions(host="127.0.0.1", transport=transport)
    cache = SimpleNamespace(pool=SimpleNamespace(device=device), leases=None, layout=layout, offers={}, rank=0)
    _, fetcher = make_transport(cache, options)
    assert [name for name in fetcher._allowed if name in fetcher._pullers] == names


@pytest.mark.parametrize("apart", [False, True])
def test_each_allocation_is_exported_once_and_every_layer_is_found_in_its_own(handles, apart):
    one = torch.randint(0, 255, (3, 16, 2, 40), dtype=torch.uint8)
    layers = [layer.clone() for layer in one] if apart else list(one)
    exported, there = exported_by_another_process(layers)
    assert len(exported.offer.regions) == (3 if apart else 1)
    assert len(handles.storages) == len(exported.offer.regions) + 1, "one more is the proof"
    assert handles.released == [(b"counter", number) for number in range(len(handles.storages))]
    pool = OpenedPool(there, CPU).pool
    for number, layer in enumerate(layers):
        assert bytes(pool.read(number, [9])[0]) == layer[9].numpy().tobytes()


def test_what_torch_says_against_an_export_or_an_opening_is_passed_on(handles, monkeypatch):
    _kept, offer = exported_by_another_process([torch.zeros(4, 64)])

    def cannot(*_):
        raise RuntimeError("CUDA error: invalid argument\nCompile with ...")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(cannot))
    with pytest.raises(CannotOpen, match=r"here \(CUDA error: invalid argument\)"):
        OpenedPool(offer, CPU)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", cannot)
    with pytest.raises(CannotExport, match=r"\(CUDA error: invalid argument\): does PYTORCH_CUDA_ALLOC_CONF ask"):
        export([torch.zeros(4, 64)])


@pytest.mark.parametrize(
    "words",
    [
        "unable to open shared memory object </torch_1_2_0> in read-write mode: No space left on device (28)",
        "unable to write to file </torch_1_2_0>: No space left on device (28)",
    ],
)
def test_a_full_dev_shm_is_named(handles, monkeypatch, words):
    def cannot(*_):
        raise RuntimeError(words)

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", cannot)
    with pytest.raises(CannotExport, match="torch needs a page of /dev/shm for it"):
        export([torch.zeros(4, 64)])


def test_a_share_ends_with_the_export_however_long_the_engine_keeps_its_cache(handles, monkeypatch):
    """Torch warns at the end of a process of whatever it still shares then."""
    made = []

    def alias(storage):
        made.append(torch.UntypedStorage(storage.nbytes()))
        return made[-1]

    monkeypatch.setattr(ipc, "_alias", alias)
    cache = torch.zeros(4, 64, dtype=torch.uint8)
    exported = export([cache])
    handles.storages.clear()
    shared = made.pop()._weak_ref()
    assert not torch.UntypedStorage._expired(shared)
    del exported
    assert torch.UntypedStorage._expired(shared)


def test_what_is_shared_is_the_cache_itself_where_it_has_no_second_name():
    storage = torch.zeros(8, dtype=torch.uint8).untyped_storage()
    assert ipc._alias(storage) is storage, "there is no CUDA here"


@pytest.fixture
def driver(monkeypatch):
    """Two GPUs that this process sees as 0 and 1, which reach each other if `driver["peers"]`."""
    state = {"peers": True, "asked": []}
    monkeypatch.setattr(ipc, "gpu_uuid", lambda device: f"GPU-{device.index}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def peers(ours, theirs):
        state["asked"].append((ours.index, theirs))
        return state["peers"]

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", peers)
    return state


def test_two_gpus_must_reach_each_other_where_both_are_seen(driver):
    require_access("GPU-1", GPU)
    assert driver["asked"] == [(0, 1)]
    driver["peers"] = False
    with pytest.raises(CannotOpen, match="cannot read each other's memory"):
        require_access("GPU-1", GPU)


def test_the_same_gpu_and_one_that_is_hidden_are_left_to_the_opening(driver):
    driver["peers"] = False
    require_access("GPU-0", GPU)
    require_access("GPU-7", GPU)
    assert driver["asked"] == []


def test_a_cache_of_a_gpu_is_not_opened_without_one():
    with pytest.raises(CannotOpen, match="one of the KV caches is on a GPU"):
        require_access("GPU-1", CPU)


def test_what_this_process_exported_itself_is_opened_without_its_handle(handles):
    cache = a_cache()
    kept, own = exported_by_another_process(list(cache), pid=os.getpid())
    handles.storages.clear()
    pool = OpenedPool(own, CPU).pool
    assert bytes(pool.read(2, [5])[0]) == cache[2, 5].numpy().tobytes()
    del kept
    with pytest.raises(CannotOpen, match="no longer exported"):
        OpenedPool(own, CPU)
