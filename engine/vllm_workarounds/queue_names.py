"""Takes the names off the shared memory through which vLLM's engine process and its ranks talk.

vLLM removes a queue's name when the queue is closed in order; after a SIGKILL, or a stop that did not wait, it stays in
/dev/shm for ever, up to 240 MiB each. Once both ends have opened a queue nobody needs its name, and without one the
memory goes with the last process. Called from the connector, in the process of each rank and in the engine process,
when all queues are open.
"""

from __future__ import annotations

import gc

from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer


def forget_queue_names() -> None:
    """Of every queue that this process has made. Takes some 50 ms, for a look at all objects."""
    for found in gc.get_objects():
        if type(found) is ShmRingBuffer and found.is_creator:
            found.shared_memory.unlink()
            found.is_creator = False  # else it would remove the name again when it is closed
