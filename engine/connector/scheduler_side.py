"""The connector's scheduler side: decides what is published, fetched and released. It moves no bytes.

It runs on the engine's step loop, so each method is only a few dictionary operations. Hooks have the names that vLLM
gives them, and `kv_connector` passes calls on unchanged. Order of calls in one step:
`on_new_request`, `get_num_new_matched_tokens`, `update_state_after_alloc`, `build_connector_meta`, (the step),
`update_connector_output`, `request_finished_all_groups`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.v1.request import RequestStatus

from ridgeline.contracts import errors
from ridgeline.contracts.handoff import KvHandoff, TransferResult, shown_id
from ridgeline.engine.connector.accounting import StepAccountant
from ridgeline.engine.connector.chunks import PartialExports
from ridgeline.engine.connector.events import TransferEvent
from ridgeline.engine.connector.groups import CacheGroups
from ridgeline.engine.connector.messages import (
    FIRST_TOKEN_FOLLOWS,
    NO_ROOM,
    PREFIX_CACHE_SKIPPED,
    REUSE,
    TRANSFER_EVENTS,
    CounterStats,
    Endpoint,
    Fetch,
    Publish,
    StepInstructions,
    TransferResults,
    join_results,
)

FETCH = "do_remote_prefill"
PUBLISH = "do_remote_decode"
IDLE_WAIT_S = 0.02
"""The time that the step loop waits for news while every request waits for a transfer. Each step without work sends
statistics to the front end, from which the worker knows that its engine lives."""
POLL_S = 0.001
"""The first wait while vLLM has other requests that cannot run, say while a grammar is being compiled: vLLM's own
pause. Nothing tells the loop when they can. Each wait is longer by as much, so that the steps leave their CPU time to
what they wait for, and notice its end late by a small part of the time it took."""
STUCK_S = 5.0
"""How long an engine runs and moves nothing before one of its requests gives up its KV on another worker."""
OFFER_LEASE_S: Final = 5.0
"""How long an offer is held that nobody reads: longer than a prompt waits in an engine's queue. Nobody renews it before
it is read, since two engines that wait for each other's blocks would keep each other waiting."""
MOST_OF_FREE: Final = 0.5
"""The part of the free blocks that an offer may take from the sequences that run."""


class CachedOffers:
    """What this engine's prefix cache still has of a prompt, offered to an engine that would compute it.

    A later turn of a conversation begins with the answer of the one before, which only the worker that decoded it has.
    Nothing is kept for that: vLLM's own lookup says what is left, and only this is held, beside the blocks of vLLM's
    requests, until it is read or its lease ends. So nothing is lost if nobody comes back.
    """

    def __init__(self, groups: CacheGroups) -> None:
        self._groups = groups
        self._manager: Any = None
        self._held: dict[str, list[Any]] = {}

    def bind(self, kv_cache_manager: Any) -> None:
        """Take vLLM's manager of the KV cache, which exists later than this."""
        self._manager = kv_cache_manager

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, owner: str, block_hashes: Sequence[Any], num_tokens: int) -> tuple[list[int], int]:
        """Hold what is cached of a prompt of `num_tokens`; return the list of a hand-off and its number of tokens.

        The last token is left to the reader, which must compute something. Nothing is held if that would take too many
        of the free blocks.
        """
        coordinator = self._manager.coordinator
        found_tokens, tail_tokens = num_tokens, 1
        while tail_tokens:  # a state within a block may still be moved on by its sequence
            tables, found_tokens, _ = coordinator.find_longest_cache_hit(block_hashes, found_tokens - tail_tokens)
            tail_tokens = found_tokens % coordinator.scheduler_block_size
        if not found_tokens:
            return [], 0
        listed = self._groups.listed([[block.block_id for block in table] for table in tables], found_tokens)
        pool = self._manager.block_pool
        blocks = [pool.blocks[block_id] for block_id in listed]
        taken = sum(block.ref_cnt == 0 for block in blocks)
        if taken > MOST_OF_FREE * pool.get_num_free_blocks():
            return [], 0
        pool.touch(blocks)
        self._held[owner] = blocks
        return listed, found_tokens

    def free(self, owners: Iterable[str]) -> None:
        """Give up the blocks of those of these owners that hold any; they stay in the cache until vLLM needs room."""
        for owner in self._held.keys() & set(owners):
            self._manager.block_pool.free_blocks(reversed(self._held.pop(owner)))


class SchedulerSide:
    """The state of all requests whose KV is handed off, on either end."""

    def __init__(
        self,
        groups: CacheGroups,
        lease_s: float,
        vocabulary_tokens: int,
        accountant: StepAccountant,
        send_at_once: Callable[[dict[str, Any]], bool] = lambda stats: False,
        publish_at_once: Callable[[Publish], bool] = lambda publish: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`vocabulary_tokens` is the vocabulary's size: a first token sent by a peer must be below it.

        `send_at_once` sends statistics to the front end before the step that is being scheduled, and returns False if
        it cannot: they then go out with the step's. `publish_at_once` publishes a hand-off without waiting for the next
        step, and returns False if it cannot.
        """
        self._groups = groups
        self._vocabulary_tokens = vocabulary_tokens
        self._lease_s = lease_s
        self._accountant = accountant
        self._send_at_once = send_at_once
        self._publish_at_once = publish_at_once
        self._clock = clock
        self._endpoints: list[Endpoint] = []
        self._step = 0
        self._last_computing = 0
        """The newest step that computes anything."""
        self._last_ended = 0
        """The newest step whose outputs are there. On GPUs vLLM schedules the next one before it reads them."""
        self._next = StepInstructions(step=1)
        self._incoming: dict[str, KvHandoff] = {}
        """Requests whose KV is on another worker, until their fetch has been issued."""
        self._fetching: dict[str, bool] = {}
        """Issued fetches whose end is not yet reported; False if aborted. vLLM holds the blocks in both cases."""
        self._partial_source: dict[str, KvHandoff] = {}
        """The partial hand-offs among them that bring no first token; if the fetch fails, this side releases them."""
        self._publishing: set[str] = set()
        """Finished requests whose blocks stay pinned until the worker side reports them as sent."""
        self._results: dict[str, TransferResult] = {}
        self._offers = CachedOffers(groups)
        self._to_publish: deque[tuple[int, Publish]] = deque()
        """Offers, and the newest step that was scheduled before: it may still write to the last of their blocks."""
        self._reusing: dict[str, int] = {}
        """Prompts of which the beginning is fetched, and how many tokens of it."""
        self._partial = PartialExports(groups)
        self._following: dict[str, Any] = {}
        """vLLM's requests whose prompt's first token is not known yet; it arrives with the KV."""
        self._held: set[str] = set()
        """Those of them whose first token cannot arrive. They never run; their handler is notified and aborts them."""
        self._events: list[TransferEvent] = []
        self._transfer_ended = False
        """Whether one did after the last step was scheduled."""
        self._stuck_since_s = math.inf
        self._also: Callable[[], dict[str, Any]] = dict

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:
        """Store where the blocks of each rank can be fetched; called once, before the first request."""
        endpoints = [metadata[rank] for rank in sorted(metadata)]
        self._endpoints = [endpoint for endpoint in endpoints if isinstance(endpoint, Endpoint)]

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Take vLLM's manager of the KV cache; called once, before the first request."""
        self._offers.bind(kv_cache_manager)

    def has_pending_push_work(self) -> bool:
        """Return whether steps must go on without requests, so that offers end when they have been read."""
        return len(self._offers) > 0

    @property
    def counters(self) -> dict[str, float]:
        """This side's cumulative counters, and the number of requests that wait for KV."""
        return {**self._accountant.counters, "waiting_for_kv": float(len(self._incoming) + len(self._fetching))}

    def take_events(self) -> list[Any]:
        """Return the events for handlers as plain data, each once."""
        events, self._events = self._events, []
        return [msgspec.to_builtins(event) for event in events]

    def get_kv_connector_stats(self) -> CounterStats:
        """Return the counters, and the events since the last call."""
        return CounterStats(data={**self._also(), **self.counters, TRANSFER_EVENTS: self.take_events()})

    def report_also(self, also: Callable[[], dict[str, Any]]) -> None:
        """Send along what `also` returns, with each step: the scheduler's own figures."""
        self._also = also

    def tell_at_once(self, stats: dict[str, Any]) -> None:
        """Send these figures before the step that is being scheduled, if its loop runs already."""
        self._send_at_once(stats)

    def count_drafts(self, sequences: int, drafted: int, accepted: int) -> None:
        """Count what a step with speculation made of sequences that decode."""
        self._accountant.verified(sequences, drafted, accepted)

    def idle_wait_s(self, longest_s: float, num_requests: int) -> float:
        """Return how long the step loop may wait for news after a step that computed nothing.

        `num_requests`: how many vLLM has, those that ended and keep their blocks included.
        """
        if self._transfer_ended or self._events or self._next != StepInstructions(step=self._next.step):
            return 0.0  # the next step may run what waited for it, or has something to tell
        awaited = len(self._fetching) + len(self._publishing) + len(self._held)
        if awaited == num_requests:
            return longest_s
        return min(longest_s, POLL_S * max(1, self._step - self._last_computing))

    # --- admission

    def on_new_request(self, request: Any) -> None:
        """Start heartbeats at once, because the request may wait long before vLLM starts its load."""
        params = request.kv_transfer_params or {}
        external = 0
        reuses = bool(params.get(REUSE))
        handoff = KvHandoff.from_params(params["handoff"]) if params.get(FETCH) else None
        if handoff is not None and handoff.num_tokens >= request.num_prompt_tokens and not self._groups.alone:
            # vLLM would compute the last token again, whose window has been given back, or which the state includes.
            self._next.release.append(handoff)
        elif handoff is not None:
            self._incoming[request.request_id] = handoff
            if reuses:
                self._reusing[request.request_id] = 0
            else:
                external = handoff.num_tokens
                self._next.watch.append(handoff)
            if params.get(FIRST_TOKEN_FOLLOWS):
                self._following[request.request_id] = request
        if params.get(PUBLISH):
            self._partial.track(request.request_id, params["handoff_id"], request.num_prompt_tokens)
        self._accountant.expect(request.request_id, request.num_prompt_tokens, external)
        if params.get("recompute_reason"):
            self._accountant.count(f"recompute_total.{params['recompute_reason']}")

    def awaits_kv(self, request_id: str) -> bool:
        """Return whether a request's KV is to be fetched, which begins once it has blocks."""
        return request_id in self._incoming

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond the local prefix cache will arrive, and that they arrive asynchronously.

        None as the number keeps the request out of all steps.
        """
        if request.request_id in self._held:
            return None, False
        handoff = self._incoming.get(request.request_id)
        if handoff is None:
            return 0, False
        missing = handoff.num_tokens - num_computed_tokens
        if request.request_id in self._following and missing <= self._groups.longest_tail_tokens:
            self._hold(request.request_id, handoff, "already_cached")
            return None, False
        return max(0, missing), missing > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Issue the fetch: blocks are allocated. vLLM calls this again with 0 when the load has ended."""
        handoff = self._incoming.pop(request.request_id, None)
        if handoff is None:
            return
        if num_external_tokens == 0:
            # The local prefix cache had everything, or vLLM skipped the cache: the source may release.
            self._next.release.append(handoff)
            if request.skip_reading_prefix_cache:
                self._recompute(request.request_id, PREFIX_CACHE_SKIPPED)
                self._results[request.request_id] = TransferResult(outcome="failed", reason=PREFIX_CACHE_SKIPPED)
            return
        self._fetching[request.request_id] = True
        if request.request_id in self._reusing:
            self._reusing[request.request_id] = num_external_tokens
        if not handoff.complete and request.request_id not in self._following:
            self._partial_source[request.request_id] = handoff
        self._next.fetch.append(
            Fetch(request.request_id, handoff, self._groups.missing(blocks.blocks, handoff.num_tokens))
        )

    # --- the step

    def build_connector_meta(self, scheduled: Any) -> StepInstructions:
        """Return everything decided since the last step, and start the accounting of this one.

        Raises RuntimeError, which ends the engine, rather than let a step compute a placeholder.
        """
        self._forbid_placeholders(scheduled)
        self._accountant.begin(scheduled)
        self._step += 1
        self._end_standstill(scheduled)
        self._transfer_ended = False
        self._announce(self._partial.begin(self._step, scheduled))
        instructions, self._next = self._next, StepInstructions(step=self._step + 1)
        instructions.revoke = self._partial.take_revoked()
        instructions.extend = self._partial.take()
        instructions.last_step = self._partial.take_ending()
        instructions.idle = scheduled.total_num_scheduled_tokens == 0
        if not instructions.idle:
            self._last_computing = self._step
        instructions.quiet = self._last_computing <= self._last_ended
        return instructions

    def _end_standstill(self, scheduled: Any) -> None:
        """Give up the oldest request's KV on another worker if nothing has run or moved for long.

        Two engines that hand over to each other can fill each other: neither has blocks for what it is to fetch, so
        neither frees the blocks that the other is to fetch.
        """
        moves = scheduled.total_num_scheduled_tokens or self._fetching or self._transfer_ended
        if moves or not self._incoming or not self._publishing or self._last_computing > self._last_ended:
            self._stuck_since_s = math.inf
            return
        now_s = self._clock()
        self._stuck_since_s = min(self._stuck_since_s, now_s)
        if now_s - self._stuck_since_s < STUCK_S:
            return
        self._stuck_since_s = now_s
        request_id, handoff = next(iter(self._incoming.items()))
        if request_id in self._following:
            self._hold(request_id, handoff, NO_ROOM)
            return
        del self._incoming[request_id]
        self._next.release.append(handoff)
        self._recompute(request_id, NO_ROOM)
        self._results[request_id] = TransferResult(outcome="failed", reason=NO_ROOM)

    def _forbid_placeholders(self, scheduled: Any) -> None:
        if self._following or self._held:
            for request_id in scheduled.num_scheduled_tokens:
                if request_id in self._following or request_id in self._held:
                    raise RuntimeError(f"vLLM would run {request_id}, whose first token is not known yet")

    def update_connector_output(self, output: Any) -> None:
        """Process the worker side's report.

        vLLM reads the same object next and fails on an unknown id, so those are removed here.
        """
        if isinstance(output.kv_connector_worker_meta, TransferResults):
            self._read(output.kv_connector_worker_meta)
        self._transfer_ended = bool(self._transfer_ended or output.finished_sending or output.finished_recving)
        if output.finished_sending:
            self._offers.free(output.finished_sending)
            output.finished_sending &= self._publishing
            self._publishing -= output.finished_sending
        if output.finished_recving:
            output.finished_recving &= self._fetching.keys()
            for request_id in output.finished_recving:
                self._end_partial(request_id, self._results.get(request_id))
                if not self._fetching.pop(request_id):
                    self._results.pop(request_id, None)  # the request was aborted, so nothing will ask for it
                    continue
                self._fetched(request_id, self._results.get(request_id))
        if output.failed_recving and output.finished_recving:
            output.failed_recving &= output.finished_recving

    def _read(self, report: TransferResults) -> None:
        for request_id, result in report.by_request.items():  # the ranks of one request may report in different steps
            self._results[request_id] = join_results(self._results.get(request_id), result)
        if report.step is not None:
            self._last_ended = max(self._last_ended, report.step)
            self._publish_offers()
            self._accountant.end()
            self._partial.end(report.step)

    def _fetched(self, request_id: str, result: TransferResult | None) -> None:
        if request_id in self._following:
            self._complete(request_id, result)
        elif result is not None and result.outcome == "failed":
            self._recompute(request_id, result.reason)

    def _recompute(self, request_id: str, reason: str) -> None:
        """Count a prompt that decode computes itself; a prefill engine only does its own work."""
        if request_id not in self._reusing:
            self._accountant.recompute(request_id, reason)

    def _end_partial(self, request_id: str, result: TransferResult | None) -> None:
        """Release a partial hand-off whose fetch failed.

        The service keeps it for another leg to fetch, but this leg computes the prompt itself.
        """
        handoff = self._partial_source.pop(request_id, None)
        if handoff is not None and result is not None and result.outcome == "failed":
            self._next.release.append(handoff)

    # --- the end of a request

    def request_finished_all_groups(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return (whether to keep the blocks, what the output carries to the worker's handler)."""
        request_id = request.request_id
        self._accountant.forget(request_id)
        result = self._results.pop(request_id, None)
        if (reused := self._reusing.pop(request_id, 0)) and result is not None:
            result = msgspec.structs.replace(result, num_tokens=reused)
        told = {} if result is None else {"result": msgspec.to_builtins(result)}
        self._following.pop(request_id, None)
        self._held.discard(request_id)
        waiting = self._incoming.pop(request_id, None)
        if waiting is not None:
            self._next.release.append(waiting)
        if request_id in self._fetching:
            self._fetching[request_id] = False
            self._next.cancel.append(request_id)
            return False, None
        params = request.kv_transfer_params or {}
        if params.get(PUBLISH) and request.status == RequestStatus.FINISHED_LENGTH_CAPPED:
            self._partial.complete(request_id)
            return True, {"handoff": self._publish(request, block_ids).to_params(), **told}
        self._partial.drop(request_id)
        return False, told or None

    def _publish(self, request: Any, block_ids: Sequence[Sequence[int]]) -> KvHandoff:
        handoff_id = request.kv_transfer_params["handoff_id"]
        num_tokens = request.num_prompt_tokens
        used = self._groups.listed(block_ids, num_tokens)
        self._publishing.add(request.request_id)
        first_token = request.output_token_ids[-1] if request.output_token_ids else None
        publish = Publish(request.request_id, handoff_id, used, num_tokens, first_token)
        if not self._publish_at_once(publish):
            self._next.publish.append(publish)
        return self._handoff(handoff_id, num_tokens, complete=True)

    # --- offers of what is cached

    def offer(self, handoff_id: str, block_hashes: Sequence[Any], num_tokens: int) -> KvHandoff | None:
        """Offer one reader what the prefix cache has of a prompt of `num_tokens`; None if that is nothing."""
        owner = f"offer-{shown_id(handoff_id)}"
        block_ids, found_tokens = self._offers.hold(owner, block_hashes, num_tokens)
        if not found_tokens:
            return None
        lease_s = min(self._lease_s, OFFER_LEASE_S)
        publish = Publish(owner, handoff_id, block_ids, found_tokens, lease_s=lease_s)
        self._to_publish.append((self._last_computing, publish))
        self._publish_offers()
        return msgspec.structs.replace(self._handoff(handoff_id, found_tokens, complete=True), lease_s=lease_s)

    def _publish_offers(self) -> None:
        while self._to_publish and self._to_publish[0][0] <= self._last_ended:
            _, publish = self._to_publish.popleft()
            if not self._publish_at_once(publish):
                self._next.publish.append(publish)

    # --- hand-offs that are fetched while their prompt is computed

    def _announce(self, request_ids: list[str]) -> None:
        """Prefill: notify the handlers that this step begins these prompts, before it is run."""
        if not request_ids:
            return
        for request_id in request_ids:
            handoff_id, num_tokens = self._partial.describe(request_id)
            handoff = self._handoff(handoff_id, num_tokens, complete=False)
            self._events.append(TransferEvent(handoff_id=handoff_id, handoff=handoff))
        if self._send_at_once({TRANSFER_EVENTS: [msgspec.to_builtins(event) for event in self._events]}):
            self._events.clear()

    def _complete(self, request_id: str, result: TransferResult | None) -> None:
        """Decode: the fetch has ended.

        Replace the placeholder by the first token, or hold the request if there is none.
        """
        request = self._following.pop(request_id)
        token = None if result is None or result.outcome != "ok" else result.first_token
        if token is None or not 0 <= token < self._vocabulary_tokens:
            failed = result.reason if result is not None else ""
            self._held.add(request_id)
            request.num_computed_tokens = 0  # only then vLLM asks again whether it may run
            handoff_id = request.kv_transfer_params["handoff"]["handoff_id"]
            reason = failed or (errors.INTERNAL if token is None else errors.CORRUPTED)
            self._events.append(TransferEvent(handoff_id=handoff_id, failed=reason))
            return
        request.prompt_token_ids[-1] = token
        request._all_token_ids[-1] = token
        if request.num_tokens % self._groups.hash_block_size_tokens == 0 and request.block_hashes:
            request.block_hashes.pop()  # its hash covers the placeholder
            request.update_block_hashes()

    def _hold(self, request_id: str, handoff: KvHandoff, reason: str) -> None:
        del self._following[request_id]
        del self._incoming[request_id]
        self._next.unwatch.append(handoff)  # another leg, if any, fetches or releases it
        self._held.add(request_id)
        self._events.append(TransferEvent(handoff_id=handoff.handoff_id, failed=reason))

    def _handoff(self, handoff_id: str, num_tokens: int, *, complete: bool) -> KvHandoff:
        assert self._endpoints
        num_blocks = self._groups.num_blocks(num_tokens)
        return KvHandoff(
            handoff_id=handoff_id,
            addresses=tuple(endpoint.address for endpoint in self._endpoints),
            num_blocks=num_blocks,
            num_tokens=num_tokens,
            compatibility_hash=self._endpoints[0].layout_hash,
            lease_s=self._lease_s,
            num_bytes=num_blocks * sum(endpoint.block_bytes_all_layers for endpoint in self._endpoints),
            complete=complete,
        )
