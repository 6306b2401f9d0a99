"""Places in the batches of the pool that decodes, so that no client alone can fill them.

An engine decodes `max_num_seqs` sequences at a time, first come, first served: one client with enough long answers
would keep everybody else's from their second token. So a prompt is not started before its client may have one sequence
more decoded (`router/flow/prompt_queue.py` asks here when it grants a turn): a prompt that waits holds no KV block, no
lease and nothing on a worker, and whoever leaves meanwhile leaves nothing behind.

The rule is the one of admission: a client with nothing is always let in, one with something has at most `PART` of what
the others leave. What is urgent (a canary, a request whose worker was lost) does not wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from router.fleet.worker import Worker
from router.flow.fair_queue import may_have_more

PART = 7 / 8
"""Of the places, for one client alone. With fewer than eight on a worker at least one is for others."""


class DecodeSlots:
    """Of all workers of the pool together; one per router."""

    def __init__(self, workers: Callable[[], Sequence[Worker]]) -> None:
        self._workers = workers
        self._held: Counter[tuple[str, Worker | None]] = Counter()
        """By client and worker; without one while none is chosen yet."""
        self._on_free: list[Callable[[], None]] = []
        """Who took a place last is told last of the next free one."""
        self._taken = 0

    def tell(self, on_free: Callable[[], None]) -> None:
        """Have it called whenever a place is free."""
        self._on_free.append(on_free)

    def may_start(self, client: str) -> bool:
        """May one more sequence of this client be started?

        What runs on workers that leave, or are lost, takes no place from the others.
        """
        return self.as_of_now()(client)

    def as_of_now(self) -> Callable[[str], bool]:
        """As `may_start`, of any number of clients, until a place is taken or free: what is held is counted once."""
        there: set[Worker | None] = {None, *(worker for worker in self._workers() if worker.load().usable)}
        places = sum(worker.description.max_num_seqs for worker in there if worker is not None)
        held = Counter[str]()
        for (name, worker), number in self._held.items():
            if worker in there:
                held[name] += number
        total = held.total()
        return lambda client: may_have_more(held[client], total - held[client], places, PART)

    def take(self, client: str) -> Slot:
        """Count one sequence; whoever takes it releases it."""
        self._taken += 1
        return Slot(self, client)

    def add(self, client: str, worker: Worker | None, number: int) -> None:
        """Called by `Slot`."""
        self._held[client, worker] += number
        if not self._held[client, worker]:
            del self._held[client, worker]

    def freed(self) -> None:
        """Tell the pools whose prompts wait for places, each first in its turn; `Slot` calls it.

        Else the prompts of the second pool would wait for as long as there are any of the first.
        """
        for on_free in tuple(self._on_free):
            taken = self._taken
            on_free()
            if self._taken > taken:
                self._on_free.remove(on_free)
                self._on_free.append(on_free)


class Slot:
    """One sequence that is decoded, or will be once its prompt is computed."""

    def __init__(self, slots: DecodeSlots, client: str) -> None:
        self._slots = slots
        self._client = client
        self._worker: Worker | None = None
        self._open = True
        slots.add(client, None, 1)

    def on(self, worker: Worker) -> None:
        """This worker will decode it."""
        if self._open:
            self._slots.add(self._client, self._worker, -1)
            self._worker = worker
            self._slots.add(self._client, worker, 1)

    def release(self) -> None:
        """Its place is another one's. Safe to call twice."""
        if self._open:
            self._open = False
            self._slots.add(self._client, self._worker, -1)
            self._slots.freed()
