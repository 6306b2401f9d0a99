"""One side of a hand-over, in a process of its own: obeys one JSON command a line, answers each with one line.

`python peer.py HOST FETCH_DEADLINE_S`, with the repository's root on PYTHONPATH. It ends when its input ends.
"""

import json
import sys
import time

import msgspec
import xxhash

from ridgeline.contracts.handoff import KvHandoff
from ridgeline.kv_transfer.measure import Cache, CacheShape, offer

SHAPE = CacheShape(num_layers=30, num_blocks=108, block_bytes=24 << 10)
LEASE_S = 5.0
"""So that a test sees a lease end."""


class Peer:
    """Its methods are the commands."""

    def __init__(self, host, kv_fetch_timeout_s):
        self.cache = Cache(SHAPE)
        self.service = self.cache.service("grpc", host, kv_fetch_timeout_s, LEASE_S)
        self.service.start()
        self.freed = set()

    def publish(self, request_id, blocks):
        return offer(self.service, request_id, blocks, SHAPE, LEASE_S).to_params()

    def fetch(self, request_id, handoff, blocks):
        """The result, and the seconds from asking to the completion."""
        started_s = time.perf_counter()
        self.service.start_fetch(request_id, KvHandoff.from_params(handoff), {0: blocks})
        while True:
            self.service.wait(1.0)
            result = self.service.poll().results.get(request_id)  # only sources have anything freed
            if result is not None:
                return {"result": msgspec.to_builtins(result), "took_s": time.perf_counter() - started_s}

    def wait_freed(self, request_id, timeout_s):
        """Whether the blocks of this request may be used again, now or within that time."""
        deadline_s = time.monotonic() + timeout_s
        while request_id not in self.freed and time.monotonic() < deadline_s:
            self.service.wait(0.2)
            self.freed |= self.service.poll().sent
        return request_id in self.freed

    def digest(self, blocks):
        """Of the blocks' bytes, in order."""
        return xxhash.xxh3_64_hexdigest(self.cache.layers[:, blocks].contiguous().numpy())


def main():
    peer = Peer(sys.argv[1], float(sys.argv[2]))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        command, arguments = json.loads(line)
        sys.stdout.write(json.dumps(getattr(peer, command)(*arguments)) + "\n")
        sys.stdout.flush()
    peer.service.close()


if __name__ == "__main__":
    main()
