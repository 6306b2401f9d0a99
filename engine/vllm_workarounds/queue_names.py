"""Removes the names of the shared memory through which vLLM's engine process and its ranks communicate.

vLLM removes a queue's name when the queue is closed in order. After a SIGKILL, or a stop that did not wait, the memory
stays in /dev/shm forever, up to 240 MiB each. Once both ends have opened a queue its name is not needed, and without a
name the memory is freed with the last process. Called from the connector when all queues are open, in the process of
each rank and in the engine process.
"""

from __future__ import annotations

import gc

from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer


def forget_queue_names() -> None:
    """Unlink every queue that this process has created. Takes about 50 ms to scan all objects."""
    for found in gc.get_objects():
        if type(found) is ShmRingBuffer and found.is_creator:
            found.shared_memory.unlink()
            found.is_creator = False  # otherwise closing the queue would unlink it again
