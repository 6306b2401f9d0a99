"""Decides before any work whether a request is accepted; one that cannot fit, or would wait too long, is refused.

`decide` is a pure function of a snapshot. `Admission` makes the snapshot and counts what is accepted and refused.
vLLM's server asks twice: before it has tokenised the prompt (`check`), and then with the tokens (`admit`).

An accepted prompt is promised the wait at that moment. A client that comes later takes no more than its fair share
(`router/flow/fair_queue.py`), and is refused itself if that share would make it wait too long. So n clients together
have at most (1 + 1/2 + ... + 1/n) * `max_prompt_wait_s` of prompts waiting, and one client alone at most
`max_prompt_wait_s`.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

from contracts.vocabulary import Pool
from router.fleet.fleet import Worker
from router.fleet.policy import Demand, WorkerLoad, path_for, pools_of, prompt_pool
from router.flow.prompt_queue import PromptQueue
from router.observe.metrics import RequestMetrics
from router.settings import RouterSettings

AdmissionState = Literal["not_ready", "open", "draining"]
LONGEST_RETRY_AFTER_S = 60
DRAIN_WINDOW_S = 10.0
LEFT_WINDOW_S = 10.0
"""Window for requests that their clients left before the end. They cost as much as completed ones but would hold no
place, so they count against the client's share for about this long; else leaving early would evade the share."""


class Refused(Exception):
    """The request is not accepted; the message says why, and what would change that."""

    def __init__(self, status: HTTPStatus, reason: str, sentence: str, retry_after_s: float = 1.0) -> None:
        super().__init__(sentence)
        self.status = status
        self.reason = reason
        self.retry_after_s = min(LONGEST_RETRY_AFTER_S, max(1, math.ceil(retry_after_s)))
        """Whole seconds after which another try may succeed."""


@dataclass(frozen=True)
class Ask:
    """What a request asks for. Token counts are 0 until its prompt is tokenised."""

    sequences: int
    prompt_tokens: int = 0
    output_tokens: int = 0
    logprobs: int = 0
    """Log-probabilities in the answer, if it gets as many tokens as it asks for."""


@dataclass(frozen=True)
class Snapshot:
    """The state of the deployment and of accepted requests, as far as admission depends on it."""

    state: AdmissionState
    block_size_tokens: int
    answer_pool: Pool
    """The pool that decodes."""
    usable_answer_workers: int
    answer_blocks: int
    """KV blocks of that pool's usable workers."""
    whole_answer_blocks: int
    """KV blocks of all its workers, including those that are away or draining."""
    prompt_worker_blocks: int
    """KV blocks of the largest worker that may compute this prompt."""
    answer_worker_blocks: int
    """KV blocks of the largest worker that may decode the answer."""
    sequences: int
    """Sequences accepted and not ended."""
    client_sequences: int
    """This client's part of `sequences`."""
    prompt_blocks: int
    """KV blocks of their prompts: the sum without sharing, or what workers report, whichever is less."""
    client_blocks: int
    """This client's part of `prompt_blocks`."""
    client_left: int
    """Sequences that this client left recently before they had ended; see `LEFT_WINDOW_S`."""
    sequences_per_s: float
    """Rate at which sequences have ended recently."""
    blocks_per_s: float
    prompt_wait_s: float | None
    """Seconds that this client's next prompt, or the last of its n, would wait to start; None until measured."""


@dataclass(frozen=True)
class Limits:
    """Admission's limits, from the configuration."""

    max_outstanding_requests: int
    max_prompt_wait_s: float
    max_logprobs_per_request: int = 250_000
    max_client_share: float = 1.0
    """The fraction that one client may hold of what the others leave."""


def decide(ask: Ask, now: Snapshot, limits: Limits) -> None:
    """Return if the request fits; otherwise raise Refused."""
    _refuse_unless_open(now)
    _refuse_what_never_fits(ask, now, limits)
    if not now.usable_answer_workers:
        raise Refused(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "no_worker",
            f"no {now.answer_pool} worker is connected and accepting work: try again later, or see /ready",
        )
    _refuse_what_is_too_much_now(ask, now, limits)


def _refuse_unless_open(now: Snapshot) -> None:
    if now.state == "draining":
        raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "draining", "the server is shutting down")
    if now.state == "not_ready":
        raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "not_ready", "the workers are not ready yet")


def _refuse_what_never_fits(ask: Ask, now: Snapshot, limits: Limits) -> None:
    if ask.sequences > limits.max_outstanding_requests:
        raise Refused(
            HTTPStatus.BAD_REQUEST,
            "too_large",
            f"n = {ask.sequences} sequences can never be served at a time, the limit is "
            f"{limits.max_outstanding_requests} (router.max_outstanding_requests): ask for fewer",
        )
    if ask.logprobs > limits.max_logprobs_per_request:
        raise Refused(
            HTTPStatus.BAD_REQUEST,
            "too_large",
            f"the answer may have {ask.logprobs} log-probabilities (of the prompt's tokens and of max_tokens, for each "
            f"of n sequences), the limit is {limits.max_logprobs_per_request} (router.max_logprobs_per_request): ask "
            "for fewer per token, lower max_tokens or n, send a shorter prompt, or stream the answer, so that its own "
            "log-probabilities do not count",
        )
    alone = _share(limits.max_outstanding_requests, limits)
    if ask.sequences > alone:
        raise Refused(
            HTTPStatus.BAD_REQUEST,
            "too_large",
            f"n = {ask.sequences} sequences can never be served to one client at a time, {alone} of the "
            f"{limits.max_outstanding_requests} can (router.max_client_share): ask for fewer",
        )
    if not now.usable_answer_workers:
        return  # their size is not known
    prompt_blocks = _blocks(ask.prompt_tokens, now)
    whole_blocks = _blocks(ask.prompt_tokens + ask.output_tokens, now)
    for needed, have, what in (
        (prompt_blocks, now.prompt_worker_blocks, f"the prompt ({ask.prompt_tokens} tokens)"),
        (
            whole_blocks,
            now.answer_worker_blocks,
            f"prompt and answer ({ask.prompt_tokens} + {ask.output_tokens} tokens)",
        ),
    ):
        if needed > have > 0:
            raise Refused(
                HTTPStatus.BAD_REQUEST,
                "too_large",
                f"{what} take {needed} KV blocks and the largest worker has {have}: send a shorter prompt or lower "
                "max_tokens (the server's setting is pools.*.kv_cache_bytes)",
            )
    if ask.sequences * prompt_blocks > now.whole_answer_blocks:
        raise Refused(
            HTTPStatus.BAD_REQUEST,
            "too_large",
            f"n = {ask.sequences} prompts of {prompt_blocks} KV blocks each take {ask.sequences * prompt_blocks}, and "
            f"the {now.answer_pool} pool has {now.whole_answer_blocks}: ask for fewer, or send a shorter prompt (the "
            f"server's settings are pools.{now.answer_pool}.kv_cache_bytes and workers)",
        )


def _refuse_what_is_too_much_now(ask: Ask, now: Snapshot, limits: Limits) -> None:
    excess = now.sequences + ask.sequences - limits.max_outstanding_requests
    if excess > 0:
        raise _overload(
            "overload",
            f"{now.sequences} requests are being served, the limit is {limits.max_outstanding_requests} "
            "(router.max_outstanding_requests)",
            _seconds(excess, now.sequences_per_s),
        )
    if now.prompt_wait_s is not None and now.prompt_wait_s > limits.max_prompt_wait_s:
        raise _overload(
            "prompt_wait",
            f"{_prompts(ask)} would wait about {now.prompt_wait_s:.0f} s to be started, the limit is "
            f"{limits.max_prompt_wait_s:.0f} s (router.max_prompt_wait_s)",
            now.prompt_wait_s - limits.max_prompt_wait_s,
        )
    wanted = now.prompt_blocks + ask.sequences * _blocks(ask.prompt_tokens, now)
    if wanted > now.answer_blocks:
        raise _overload(
            "kv_blocks",
            f"the prompts accepted and this one take {wanted} KV blocks, the {now.answer_pool} pool has "
            f"{now.answer_blocks} (pools.{now.answer_pool}.kv_cache_bytes and workers)",
            _seconds(wanted - now.answer_blocks, now.blocks_per_s),
        )
    _refuse_beyond_the_clients_share(ask, now, limits)


def _refuse_beyond_the_clients_share(ask: Ask, now: Snapshot, limits: Limits) -> None:
    """Limit a client to its share of what the others leave, so that any other client finds room.

    One sequence is accepted whatever it takes, if its client has no other.
    """
    others = now.sequences - now.client_sequences
    may_have = _share(limits.max_outstanding_requests, limits)
    if (
        now.client_left
        and limits.max_client_share < 1
        and now.client_sequences + now.client_left + ask.sequences > may_have
    ):
        raise _overload(
            "client_share",
            f"{now.client_sequences} of your requests are being served and you left {now.client_left} recently before "
            f"they had ended; you may have {may_have} of both (router.max_client_share)",
            LEFT_WINDOW_S * math.log((now.client_sequences + now.client_left + ask.sequences) / may_have),
        )
    may_have = _share(limits.max_outstanding_requests - others, limits)
    if now.client_sequences + ask.sequences > may_have:
        raise _overload(
            "client_share",
            f"{now.client_sequences} of your requests are being served and {others} of other clients; you may have "
            f"{may_have} at a time now, of {limits.max_outstanding_requests} (router.max_client_share)",
            _seconds(now.client_sequences + ask.sequences - may_have, now.sequences_per_s),
        )
    blocks = ask.sequences * _blocks(ask.prompt_tokens, now)
    may_have = _share(now.answer_blocks - (now.prompt_blocks - now.client_blocks), limits)
    alone = ask.sequences == 1 and not now.client_sequences
    if now.client_blocks + blocks > may_have and not alone:
        raise _overload(
            "client_share",
            f"the prompts of your requests would take {now.client_blocks + blocks} KV blocks with this one; you may "
            f"have {may_have} now, of {now.answer_blocks} (router.max_client_share)",
            _seconds(now.client_blocks + blocks - may_have, now.blocks_per_s),
        )


def _share(of: int, limits: Limits) -> int:
    return max(1, int(limits.max_client_share * of))


def _overload(reason: str, sentence: str, retry_after_s: float) -> Refused:
    refused = Refused(HTTPStatus.TOO_MANY_REQUESTS, reason, sentence, retry_after_s)
    refused.args = (f"{sentence}: try again in {refused.retry_after_s} s",)
    return refused


def _prompts(ask: Ask) -> str:
    return "a prompt" if ask.sequences == 1 else f"the last of n = {ask.sequences} prompts"


def _blocks(tokens: int, now: Snapshot) -> int:
    return -(-tokens // now.block_size_tokens)


def _seconds(amount: float, per_s: float) -> float:
    return amount / per_s if per_s > 0 else 1.0


class Admission:
    """The requests that this router has accepted; one object per router process."""

    def __init__(
        self,
        settings: RouterSettings,
        queues: Mapping[Pool, PromptQueue],
        workers: Callable[[Pool], list[Worker]],
        metrics: RequestMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state: AdmissionState = "not_ready"
        self._limits = Limits(
            max_outstanding_requests=settings.max_outstanding_requests,
            max_prompt_wait_s=settings.max_prompt_wait_s,
            max_logprobs_per_request=settings.max_logprobs_per_request,
            max_client_share=settings.max_client_share,
        )
        self._mode = settings.mode
        self._answer_pool = pools_of(settings.mode)[-1]
        self._min_remote_prefill_tokens = settings.min_remote_prefill_tokens
        self._queues = queues
        self._workers = workers
        self._metrics = metrics
        self._held: dict[str, _Held] = {}
        """What each client holds; clients that hold nothing are left out."""
        self._all = _Held()
        self._left: dict[str, _Fading] = {}
        """For each client, the sequences that it left recently before they had ended."""
        self._clock = clock
        self._ended_sequences = _Fading(clock, DRAIN_WINDOW_S)
        self._ended_blocks = _Fading(clock, DRAIN_WINDOW_S)

    def check(self, client: str, sequences: int) -> None:
        """Raise Refused if a request of this client would be refused, as far as can be told without its prompt."""
        pools: set[Pool] = {self._prompt_pool(0), self._prompt_pool(self._min_remote_prefill_tokens)}
        waits_s = [self._queues[pool].wait_s(client, 0) for pool in pools]
        shortest_s = None if None in waits_s else min(wait_s for wait_s in waits_s if wait_s is not None)
        self._decide(Ask(sequences), self._snapshot(client, self._prompt_pool(0), shortest_s))

    def check_share(self, client: str, coming: int) -> None:
        """Raise Refused if one more request of this client would exceed its share, counting those still coming."""
        if self._limits.max_client_share >= 1 or self.state != "open":
            return
        if not (client in self._held or client in self._left or coming):
            return
        now = self._snapshot(client, self._prompt_pool(0), None)
        if now.usable_answer_workers:
            self._or_counted(lambda: _refuse_beyond_the_clients_share(Ask(1 + coming), now, self._limits))

    @property
    def most_of_one_client(self) -> int:
        """How many sequences one client may have served at the same time if it is alone."""
        return _share(self._limits.max_outstanding_requests, self._limits)

    @property
    def sequences(self) -> int:
        """Sequences accepted and not ended."""
        return self._all.sequences

    def admit(self, client: str, ask: Ask) -> Permit:
        """Accept a request until its permit is released. Raises Refused."""
        pool = self._prompt_pool(ask.prompt_tokens)
        now = self._snapshot(client, pool, self._queues[pool].wait_s(client, ask.prompt_tokens, ask.sequences))
        self._decide(ask, now)
        blocks = _blocks(ask.prompt_tokens, now)
        self._count(client, ask.sequences, blocks)

        def give_back(ended: int, left: bool) -> None:
            self._count(client, -ended, blocks)
            if left:
                self._left.setdefault(client, _Fading(self._clock, LEFT_WINDOW_S)).add(ended)

        return Permit(ask.sequences, give_back)

    def _decide(self, ask: Ask, now: Snapshot) -> None:
        self._or_counted(lambda: decide(ask, now, self._limits))

    def _or_counted(self, decision: Callable[[], None]) -> None:
        try:
            decision()
        except Refused as refused:
            self._metrics.rejected.labels(refused.reason).inc()
            raise

    def _count(self, client: str, sequences: int, blocks_each: int) -> None:
        held = self._held.setdefault(client, _Held())
        for one in (held, self._all):
            one.sequences += sequences
            one.blocks += sequences * blocks_each
        if not held.sequences:
            del self._held[client]
        self._ended_sequences.add(max(0, -sequences))
        self._ended_blocks.add(max(0, -sequences) * blocks_each)

    def _prompt_pool(self, prompt_tokens: int) -> Pool:
        """Return the pool that would compute a prompt of this length."""
        prefill = self._queues.get("prefill")
        usable = prefill is not None and prefill.usable_workers > 0
        return prompt_pool(path_for(Demand(prompt_tokens), self._mode, self._min_remote_prefill_tokens, usable))

    def _snapshot(self, client: str, prompt_pool: Pool, prompt_wait_s: float | None) -> Snapshot:
        held = self._held.get(client, _Held())
        answer, prompt = self._workers(self._answer_pool), self._workers(prompt_pool)
        usable = [worker for worker in answer if worker.load().usable]
        blocks = min(self._all.blocks, _blocks_taken([worker.load() for worker in usable], self._all.blocks))
        return Snapshot(
            state=self.state,
            block_size_tokens=answer[0].description.block_size_tokens if answer else 1,
            answer_pool=self._answer_pool,
            usable_answer_workers=len(usable),
            answer_blocks=sum(worker.description.num_kv_blocks for worker in usable),
            whole_answer_blocks=sum(worker.description.num_kv_blocks for worker in answer),
            prompt_worker_blocks=max((worker.description.num_kv_blocks for worker in prompt), default=0),
            answer_worker_blocks=max((worker.description.num_kv_blocks for worker in answer), default=0),
            sequences=self._all.sequences,
            client_sequences=held.sequences,
            prompt_blocks=blocks,
            client_blocks=held.blocks * blocks // max(1, self._all.blocks),
            client_left=self._left_by(client),
            sequences_per_s=self._ended_sequences.per_s,
            blocks_per_s=self._ended_blocks.per_s,
            prompt_wait_s=prompt_wait_s,
        )

    def _left_by(self, client: str) -> int:
        for name in [name for name, left in self._left.items() if left.amount < 1]:
            del self._left[name]
        return int(self._left[client].amount) if client in self._left else 0


def _blocks_taken(loads: list[WorkerLoad], accepted_blocks: int) -> int:
    """Return the blocks in use: what workers report, plus what they cannot report yet.

    That is what was sent there recently or waits here. Prompts with a shared prefix use its blocks once, which only the
    reports show.
    """
    reported = sum(load.kv_blocks_total - load.kv_blocks_free for load in loads)
    promised = sum(load.kv_blocks_promised for load in loads)
    waiting = max(0, accepted_blocks - sum(load.kv_blocks_held for load in loads))
    return reported + promised + waiting


@dataclass
class _Held:
    sequences: int = 0
    blocks: int = 0


class Permit:
    """One accepted request.

    Each of its sequences is given back once, when it has ended on the workers, whether or not its client has read it.
    The remaining ones are given back when the permit is dropped.

    A client may leave between the acceptance of its request and the start of its answer, or a later prompt of the
    same list may be refused. The generator that would have served it is then never started, only dropped. Such
    sequences never reached a worker, so they do not count as left.
    """

    def __init__(self, sequences: int, give_back: Callable[[int, bool], None]) -> None:
        """`give_back` receives how many sequences have ended, and whether they were left before their end."""
        self._rest = [sequences]
        self._give_back = give_back
        self._finalizer = weakref.finalize(self, _give_back_rest, self._rest, give_back)
        self._finalizer.atexit = False

    def sequence_ended(self, *, left: bool = False) -> None:
        """Give back one sequence that has ended, or that was `left` before its end."""
        if self._rest[0]:
            self._rest[0] -= 1
            self._give_back(1, left)

    def release(self) -> None:
        """Give back all remaining sequences. May be called twice."""
        self._finalizer()


def _give_back_rest(rest: list[int], give_back: Callable[[int, bool], None]) -> None:
    number, rest[0] = rest[0], 0
    if number:
        give_back(number, False)


class _Fading:
    """An amount that decays exponentially with a time constant of `window_s` seconds."""

    def __init__(self, clock: Callable[[], float], window_s: float) -> None:
        self._clock = clock
        self._window_s = window_s
        self._value = 0.0
        self._at_s = clock()

    def add(self, amount: float) -> None:
        self._value = self.amount + amount
        self._at_s = self._clock()

    @property
    def per_s(self) -> float:
        return self.amount / self._window_s

    @property
    def amount(self) -> float:
        return self._value * math.exp((self._at_s - self._clock()) / self._window_s)
