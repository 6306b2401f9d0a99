"""A queue between an engine process and its ranks works without a name, so that nothing stays when all are killed."""

from pathlib import Path

from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer

from ridgeline.engine.vllm_workarounds.engine_process import forget_queue_names
from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly


def test_the_name_goes_and_the_queue_goes_on_in_both_directions_and_is_closed_without_complaint():
    queue = ShmRingBuffer(n_reader=1, max_chunk_bytes=1024, max_chunks=2)
    name = Path("/dev/shm") / queue.shared_memory.name.lstrip("/")
    reader = ShmRingBuffer(*queue.handle())
    assert name.exists()
    forget_queue_names()
    assert not name.exists()
    with queue.get_data(1) as written:
        written[:5] = b"hello"
    with reader.get_data(1) as read:
        assert bytes(read[:5]) == b"hello"
    forget_queue_names()  # there is nothing left to do
    queue.__del__()
    reader.__del__()
