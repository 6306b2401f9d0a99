"""Torch's functions for CUDA IPC, made up within one process: memory of the host stands in for a GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ridgeline.kv_transfer.memory import ipc

UUID = "GPU-0"


@dataclass
class Handles:
    """A handle is the number of a storage of this process."""

    storages: list[Any] = field(default_factory=list)
    released: list[tuple[bytes, int]] = field(default_factory=list)
    """The shares whose one receiver is waited for no more, as torch does until it is told."""


@contextmanager
def made_up_handles() -> Iterator[Handles]:
    """Have the caches of this process exported and opened as if they were on one GPU."""
    handles = Handles()

    def share(storage: Any) -> tuple[Any, ...]:
        handles.storages.append(storage)
        number = len(handles.storages) - 1
        return 0, b"%d" % number, storage.nbytes(), 0, b"counter", number, b"event", True

    def open_shared(
        index: None, handle: bytes, num_bytes: int, offset: int, counter: bytes, counter_offset: int, *event: Any
    ) -> Any:
        storage = handles.storages[int(handle)]
        assert (index, num_bytes, offset) == (None, storage.nbytes(), 0)
        assert (counter, counter_offset, event) == (b"counter", int(handle), (b"", False))
        return storage

    release = staticmethod(lambda counter, offset: handles.released.append((counter, offset)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "_share_cuda_", share, raising=False)
        patch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(open_shared), raising=False)
        patch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", release, raising=False)
        patch.setattr(ipc, "_alias", lambda storage: storage)
        patch.setattr(ipc, "_require_one_gpu", lambda _rows: None)
        patch.setattr(ipc, "require_access", lambda _theirs, _ours: None)
        patch.setattr(ipc, "gpu_uuid", lambda _device: UUID)
        patch.setattr("ridgeline.decode_worker.kv_fetch.ipc_puller.gpu_uuid", lambda _device: UUID)
        yield handles
