"""Places in the batches of the workers that decode, limited per client so that none can fill them alone.

An engine decodes `max_num_seqs` sequences at a time, in order of arrival: one client with enough long answers would
keep all others from their second token. So a prompt starts only when its client may have one more sequence decoded
(`router/flow/prompt_queue.py` asks here when it grants a turn). A waiting prompt holds no KV block, no lease and
nothing on a worker, so a client that leaves meanwhile leaves nothing behind.

The rule is admission's: a client with nothing may always start, and one with something has at most `PART` of what the
others leave. Urgent requests (a health probe, a request whose worker was lost) do not wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ridgeline.router.fleet.worker import Worker
from ridgeline.router.flow.fair_queue import may_have_more

PART = 7 / 8
"""The fraction of places that one client alone may have; a worker with at least two places keeps one for others."""


class DecodeSlots:
    """The places of all workers that decode together; one object per router."""

    def __init__(self, workers: Callable[[], Sequence[Worker]]) -> None:
        self._workers = workers
        self._held: dict[Worker | None, Counter[str]] = {}
        """Places in use by worker and client; the worker is None until one is chosen."""
        self._of_client: Counter[str] = Counter()
        """The same by client alone, for a look takes place with each event, and there may be thousands of clients."""
        self._total = 0
        self._on_free: list[Callable[[], None]] = []
        """Callbacks in order: the one that took a place last is called last for the next free one."""
        self._taken = 0

    def tell(self, on_free: Callable[[], None]) -> None:
        """Register a callback for when a place is free."""
        self._on_free.append(on_free)

    def may_start(self, client: str) -> bool:
        """Return whether one more sequence of this client may start.

        Sequences on workers that leave or are lost do not count.
        """
        return self.as_of_now()(client)

    def as_of_now(self) -> Callable[[str], bool]:
        """Return `may_start` as a function that counts once and is valid until a place is taken or freed."""
        there = {worker for worker in self._workers() if worker.usable}
        places = sum(worker.max_num_seqs for worker in there)
        gone = [held for worker, held in self._held.items() if worker is not None and worker not in there]
        total = self._total - sum(held.total() for held in gone)

        def may_start(client: str) -> bool:
            held = self._of_client[client] - sum(elsewhere[client] for elsewhere in gone)
            return may_have_more(held, total - held, places, PART)

        return may_start

    def take(self, client: str) -> DecodeSlot:
        """Count one sequence; the caller must release the slot."""
        self._taken += 1
        return DecodeSlot(self, client)

    def add(self, client: str, worker: Worker | None, number: int) -> None:
        """Change the count of places, for `DecodeSlot`."""
        held = self._held.setdefault(worker, Counter())
        self._total += number
        for counts in (held, self._of_client):
            counts[client] += number
            if not counts[client]:
                del counts[client]
        if not held:
            del self._held[worker]

    def freed(self) -> None:
        """Offer a free place to the pools whose prompts wait, in turn; for `DecodeSlot`.

        In a fixed order, the second pool's prompts would wait as long as the first pool has any.
        """
        for on_free in tuple(self._on_free):
            taken = self._taken
            on_free()
            if self._taken > taken:
                self._on_free.remove(on_free)
                self._on_free.append(on_free)


class DecodeSlot:
    """The place of one sequence that is decoded, or will be once its prompt is computed."""

    def __init__(self, slots: DecodeSlots, client: str) -> None:
        self._slots = slots
        self._client = client
        self._worker: Worker | None = None
        self._open = True
        slots.add(client, None, 1)

    def on(self, worker: Worker) -> None:
        """Assign the worker that will decode the sequence."""
        if self._open:
            self._slots.add(self._client, self._worker, -1)
            self._worker = worker
            self._slots.add(self._client, worker, 1)

    def release(self) -> None:
        """Free the place. May be called twice."""
        if self._open:
            self._open = False
            self._slots.add(self._client, self._worker, -1)
            self._slots.freed()
