"""What placed requests hold on workers, and how many sequences a client may have decoded.

An engine decodes `max_num_seqs` sequences at a time, in order of arrival: one client with enough long answers would
keep all others from their second token. So a prompt starts only when its client may have one more sequence decoded. The
rule is admission's: a client with nothing may always start, and one with something has at most `PART` of what the
others leave. Urgent prompts (a health probe, a request whose worker was lost) do not wait for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ridgeline.router.fleet.request_route import Demand, blocks_needed, context_tokens
from ridgeline.router.fleet.worker import Worker
from ridgeline.router.flow.fair_queue import may_have_more

PART = 7 / 8
"""The fraction of places that one client alone may have; a worker with at least two places keeps one for others."""


class Hold:
    """What a request counts as on its workers, from its grant until `close`. All methods may be called twice."""

    def __init__(self, demand: Demand, prompt_worker: Worker, decode_worker: Worker, cached_tokens: int = 0) -> None:
        """`cached_tokens` of its prompt need not be computed."""
        self.prompt_worker, self.decode_worker = prompt_worker, decode_worker
        self.computes = True
        """Whether its prompt is still to be computed."""
        whole = decode_worker is prompt_worker
        blocks = decode_worker.description.layout.blocks_of(demand.prompt_tokens)
        self._prompt = prompt_worker.reserve(
            demand.prompt_tokens - cached_tokens,
            promised_blocks=blocks if whole else 0,
            held_blocks=blocks if whole else 0,
            decode_context_tokens=context_tokens(demand) if whole else 0,
            last_block=demand.prefix[-1] if demand.prefix else None,
            adapter=demand.adapter,
        )
        self._decode = self._prompt
        if not whole:
            self._decode = decode_worker.reserve(
                promised_blocks=blocks_needed(demand, decode_worker.description.layout),
                held_blocks=blocks,
                decode_context_tokens=context_tokens(demand),
                adapter=demand.adapter,
            )

    @property
    def splits(self) -> bool:
        """Whether another worker decodes than the one that computes the prompt."""
        return self._decode is not self._prompt

    def prompt_done(self) -> None:
        """Record that the first token has arrived; it decodes as soon as its KV has come."""
        self.computes = False
        self._prompt.prompt_done()
        self._decode.first_token_made()

    def prompt_left(self) -> None:
        """Record that it has left the worker that computed its prompt, if another one decodes."""
        self.computes = False
        if self.splits:
            self._prompt.close()

    def decode_began(self) -> None:
        """Record that it has sent a token from where it decodes, and so reports its blocks."""
        self._decode.prompt_done()

    def close(self) -> None:
        """Record that it has left all workers."""
        self.computes = False
        self._prompt.close()
        self._decode.close()


class DecodePlaces:
    """The places in the batches of all workers that decode together, by client."""

    def __init__(self, workers: Callable[[], Sequence[Worker]]) -> None:
        self._workers = workers
        self._held: dict[Worker, Counter[str]] = {}
        self._of_client: Counter[str] = Counter()
        """The same by client alone, for a look takes place with each grant, and there may be thousands of clients."""
        self._total = 0

    def add(self, client: str, worker: Worker, number: int) -> None:
        """Change the count of a client's places on a worker."""
        held = self._held.setdefault(worker, Counter())
        self._total += number
        for counts in (held, self._of_client):
            counts[client] += number
            if not counts[client]:
                del counts[client]
        if not held:
            del self._held[worker]

    def take_adapter(self, key: str) -> bool:
        """Return whether a worker that decodes has a place for one more sequence with this LoRA adapter."""
        return not key or any(worker.usable and worker.adapters.has_place_for(key) for worker in self._workers())

    def as_of_now(self) -> Callable[[str], bool]:
        """Return whether a client's next sequence may start, as a function that is valid until `add`.

        Sequences on workers that leave or are lost do not count.
        """
        there = {worker for worker in self._workers() if worker.usable}
        places = sum(worker.max_num_seqs for worker in there)
        gone = [held for worker, held in self._held.items() if worker not in there]
        total = self._total - sum(held.total() for held in gone)

        def may_start(client: str) -> bool:
            held = self._of_client[client] - sum(elsewhere[client] for elsewhere in gone)
            return may_have_more(held, total - held, places, PART)

        return may_start
