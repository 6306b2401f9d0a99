"""The rules of admission: whether a request is accepted, as a pure function of a snapshot (`decide`).

`ridgeline.router.flow.admission` makes the snapshot. `Refused` is also raised by `ridgeline.router.flow.held_bodies`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

from ridgeline.contracts.handoff import LayerGroup, blocks_of
from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.settings import RouterConfig

AdmissionState = Literal["not_ready", "open", "draining"]
LONGEST_RETRY_AFTER_S = 60
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
class ListSoFar:
    """The prompts of a list that were accepted before the next one: a list is limited as one request, not by prompt."""

    sequences: int = 0
    prompt_tokens: int = 0
    prompt_blocks: int = 0
    logprobs: int = 0

    def plus(self, ask: Ask, blocks_each: int) -> ListSoFar:
        """Return it with one more."""
        return ListSoFar(
            self.sequences + ask.sequences,
            self.prompt_tokens + ask.sequences * ask.prompt_tokens,
            self.prompt_blocks + ask.sequences * blocks_each,
            self.logprobs + ask.logprobs,
        )


@dataclass(frozen=True)
class Ask:
    """What a request asks for. Token counts are 0 until its prompt is tokenised."""

    sequences: int
    prompt_tokens: int = 0
    output_tokens: int = 0
    logprobs: int = 0
    """Log-probabilities in the answer, if it gets as many tokens as it asks for."""
    before: ListSoFar = ListSoFar()

    @property
    def tokens_before_the_last(self) -> int:
        """Prompt tokens that start before the last of its sequences does."""
        return self.before.prompt_tokens + (self.sequences - 1) * self.prompt_tokens


@dataclass
class WorkerTotals:
    """Sums over the workers of the pool that answers, and the largest of the one that computes the prompt."""

    block_size: int = 1
    usable: int = 0
    usable_blocks: int = 0
    """KV blocks of the usable ones."""
    all_blocks: int = 0
    """KV blocks of all, including those that are away or draining."""
    largest_blocks: int = 0
    largest_prompt_blocks: int = 0
    reported_blocks: int = 0
    """Blocks in use on the usable ones, by their last reports."""
    promised_blocks: int = 0
    held_blocks: int = 0
    """See `ridgeline.router.fleet.worker.Outstanding`."""
    groups: tuple[LayerGroup, ...] = ()
    """See `ridgeline.contracts.handoff.KvLayout`."""

    def blocks_of(self, tokens: int) -> int:
        """Return the KV blocks that a sequence of so many tokens holds."""
        return blocks_of(tokens, self.block_size, self.groups)


@dataclass(frozen=True)
class Snapshot:
    """The state of the deployment and of accepted requests, as far as admission depends on it."""

    state: AdmissionState
    answer_pool: Pool
    """The pool that decodes."""
    workers: WorkerTotals
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
    """Seconds that this client's next prompt, or the last of several, would wait to start; None until measured."""


_CLOSED = {"draining": "the server is shutting down", "not_ready": "the workers are not ready yet"}


def decide(ask: Ask, now: Snapshot, limits: RouterConfig) -> None:
    """Return if the request fits; otherwise raise Refused."""
    if now.state in _CLOSED:
        raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, now.state, _CLOSED[now.state])
    _refuse_what_never_fits(ask, now, limits)
    if not now.workers.usable:
        raise Refused(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "no_worker",
            f"no {now.answer_pool} worker is connected and accepting work: try again later, or see /ready",
        )
    _refuse_what_is_too_much_now(ask, now, limits)


def _refuse_what_never_fits(ask: Ask, now: Snapshot, limits: RouterConfig) -> None:
    sequences, logprobs = ask.before.sequences + ask.sequences, ask.before.logprobs + ask.logprobs
    if sequences > limits.max_concurrent_requests:
        raise _too_large(
            f"{_several(ask, 'sequences')} can never be served at a time, the limit is "
            f"{limits.max_concurrent_requests} (router.max_concurrent_requests): ask for fewer"
        )
    if logprobs > limits.max_logprobs_per_request:
        raise _too_large(
            f"the answer may have {logprobs} log-probabilities (of the prompt's tokens and of max_tokens, for each of "
            f"n sequences and of a list's prompts), the limit is {limits.max_logprobs_per_request} "
            "(router.max_logprobs_per_request): ask for fewer per token, lower max_tokens or n, send fewer or shorter "
            "prompts, or stream the answer, so that its own log-probabilities do not count"
        )
    alone = share_of(limits.max_concurrent_requests, limits)
    if sequences > alone:
        raise _too_large(
            f"{_several(ask, 'sequences')} can never be served to one client at a time, {alone} of the "
            f"{limits.max_concurrent_requests} can (router.max_client_share): ask for fewer"
        )
    if now.workers.usable:  # otherwise their size is not known
        _refuse_what_no_worker_holds(ask, now)


def _refuse_what_no_worker_holds(ask: Ask, now: Snapshot) -> None:
    prompt_blocks = now.workers.blocks_of(ask.prompt_tokens)
    whole_blocks = now.workers.blocks_of(ask.prompt_tokens + ask.output_tokens)
    for needed, have, what in (
        (prompt_blocks, now.workers.largest_prompt_blocks, f"the prompt ({ask.prompt_tokens} tokens)"),
        (
            whole_blocks,
            now.workers.largest_blocks,
            f"prompt and answer ({ask.prompt_tokens} + {ask.output_tokens} tokens)",
        ),
    ):
        if needed > have > 0:
            raise _too_large(
                f"{what} take {needed} KV blocks and the largest worker has {have}: send a shorter prompt or lower "
                "max_tokens (the server's setting is pools.*.kv_cache_memory_bytes)"
            )
    together = ask.before.prompt_blocks + ask.sequences * prompt_blocks
    if together > now.workers.all_blocks:
        raise _too_large(
            f"{_several(ask, 'prompts')} take {together} KV blocks, and the {now.answer_pool} pool has "
            f"{now.workers.all_blocks}: ask for fewer, or send shorter ones (the server's settings are "
            f"pools.{now.answer_pool}.kv_cache_memory_bytes and workers)"
        )


def _refuse_what_is_too_much_now(ask: Ask, now: Snapshot, limits: RouterConfig) -> None:
    excess = now.sequences + ask.sequences - limits.max_concurrent_requests
    if excess > 0:
        raise _overload(
            "overload",
            f"{now.sequences} requests are being served, the limit is {limits.max_concurrent_requests} "
            "(router.max_concurrent_requests)",
            _seconds(excess, now.sequences_per_s),
        )
    if now.prompt_wait_s is not None and now.prompt_wait_s > limits.max_queue_time_s:
        raise _overload(
            "prompt_wait",
            f"{_last_prompt(ask)} would wait about {now.prompt_wait_s:.0f} s to be started, the limit is "
            f"{limits.max_queue_time_s:.0f} s (router.max_queue_time_s)",
            now.prompt_wait_s - limits.max_queue_time_s,
        )
    wanted = now.prompt_blocks + ask.sequences * now.workers.blocks_of(ask.prompt_tokens)
    if wanted > now.workers.usable_blocks:
        raise _overload(
            "kv_blocks",
            f"the prompts accepted and this one take {wanted} KV blocks, the {now.answer_pool} pool has "
            f"{now.workers.usable_blocks} (pools.{now.answer_pool}.kv_cache_memory_bytes and workers)",
            _seconds(wanted - now.workers.usable_blocks, now.blocks_per_s),
        )
    refuse_beyond_the_clients_share(ask, now, limits)


def refuse_beyond_the_clients_share(ask: Ask, now: Snapshot, limits: RouterConfig) -> None:
    """Limit a client to its share of what the others leave, so that any other client finds room.

    One sequence is accepted whatever it takes, if its client has no other.
    """
    others = now.sequences - now.client_sequences
    may_have = share_of(limits.max_concurrent_requests, limits)
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
    may_have = share_of(limits.max_concurrent_requests - others, limits)
    if now.client_sequences + ask.sequences > may_have:
        raise _overload(
            "client_share",
            f"{now.client_sequences} of your requests are being served and {others} of other clients; you may have "
            f"{may_have} at a time now, of {limits.max_concurrent_requests} (router.max_client_share)",
            _seconds(now.client_sequences + ask.sequences - may_have, now.sequences_per_s),
        )
    blocks = ask.sequences * now.workers.blocks_of(ask.prompt_tokens)
    may_have = share_of(now.workers.usable_blocks - (now.prompt_blocks - now.client_blocks), limits)
    alone = ask.sequences == 1 and not now.client_sequences
    if now.client_blocks + blocks > may_have and not alone:
        raise _overload(
            "client_share",
            f"the prompts of your requests would take {now.client_blocks + blocks} KV blocks with this one; you may "
            f"have {may_have} now, of {now.workers.usable_blocks} (router.max_client_share)",
            _seconds(now.client_blocks + blocks - may_have, now.blocks_per_s),
        )


def share_of(whole: int, limits: RouterConfig) -> int:
    """Return how much of `whole` one client may hold."""
    return max(1, int(limits.max_client_share * whole))


def _too_large(sentence: str) -> Refused:
    return Refused(HTTPStatus.BAD_REQUEST, "too_large", sentence)


def _overload(reason: str, sentence: str, retry_after_s: float) -> Refused:
    refused = Refused(HTTPStatus.TOO_MANY_REQUESTS, reason, sentence, retry_after_s)
    refused.args = (f"{sentence}: try again in {refused.retry_after_s} s",)
    return refused


def _several(ask: Ask, what: str) -> str:
    if ask.before.sequences:
        return f"the first {ask.before.sequences + ask.sequences} {what} of the list"
    return f"n = {ask.sequences} {what}"


def _last_prompt(ask: Ask) -> str:
    several = ask.before.sequences + ask.sequences > 1
    return f"the last of {_several(ask, 'prompts')}" if several else "a prompt"


def _seconds(amount: float, per_s: float) -> float:
    return amount / per_s if per_s > 0 else 1.0
