"""Which blocks of prompts that are still being computed are final.

A prompt can be fetched from the moment its first step is scheduled, when no block of it is final yet: decode admits it
meanwhile. A long one is computed in chunks, one per engine step. Once a step has its outputs, the KV of its tokens
never changes again, so its whole blocks can travel while the next chunk is computed (overlap). Steps may overlap too:
on GPUs vLLM schedules the next one before the last one's outputs are there. Only finished steps count. A block that was
in the prefix cache counts with its prompt's own first step, because another prompt of that step may compute it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from ridgeline.engine.connector.groups import CacheGroups
from ridgeline.engine.connector.messages import Extend

MOST_PARTIAL: Final = 16
"""Prompts that can be fetched before they are computed, at a time. Each has a stream and a thread at both ends, of
which a source must have some left for complete hand-offs."""


@dataclass
class _Prompt:
    handoff_id: str
    num_tokens: int
    tables: list[list[int]] = field(default_factory=list)
    """The block table of each group."""
    announced: bool = False
    final_tokens: int = 0
    offered_blocks: int | None = None
    """Blocks that readers know of; None before the hand-off exists for them."""


class PartialExports:
    """The prompts whose hand-off can be fetched while they are computed."""

    def __init__(self, groups: CacheGroups) -> None:
        self._groups = groups
        self._prompts: dict[str, _Prompt] = {}
        self._in_flight: deque[tuple[int, dict[str, int]]] = deque()
        self._revoked: list[str] = []
        self._ending: dict[str, list[int]] = {}

    def track(self, request_id: str, handoff_id: str, num_tokens: int) -> None:
        """Register a prompt of `num_tokens`."""
        self._prompts[request_id] = _Prompt(handoff_id, num_tokens)

    def begin(self, step: int, scheduled: Any) -> list[str]:
        """Record that step number `step` was scheduled; `scheduled` is vLLM's SchedulerOutput.

        Returns the requests whose hand-offs can be fetched from this step on.
        """
        for request_id in scheduled.preempted_req_ids or ():
            self._restart(request_id)
        self._ending = {}
        if not self._prompts:
            return []  # decode engines track none, and their batches have hundreds of sequences
        reached: dict[str, int] = {}
        for new in scheduled.scheduled_new_reqs:
            prompt = self._prompts.get(new.req_id)
            if prompt is not None:
                prompt.tables = [list(table) for table in new.block_ids]
                reached[new.req_id] = new.num_computed_tokens + scheduled.num_scheduled_tokens[new.req_id]
        cached = scheduled.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            prompt = self._prompts.get(request_id)
            if prompt is None:
                continue
            if request_id in cached.resumed_req_ids:
                prompt.tables = [[] for _ in prompt.tables]
            for table, more in zip(prompt.tables, blocks or (), strict=False):
                table += more
            reached[request_id] = computed + scheduled.num_scheduled_tokens[request_id]
        if reached:
            self._in_flight.append((step, reached))
        self._ending = {
            prompt.handoff_id: self._groups.listed(prompt.tables, prompt.num_tokens)
            for request_id, tokens in reached.items()
            if tokens >= (prompt := self._prompts[request_id]).num_tokens and self._groups.alone
        }
        return self._announce([new.req_id for new in scheduled.scheduled_new_reqs])

    def end(self, step: int) -> None:
        """Record that this step and all before it have their outputs."""
        while self._in_flight and self._in_flight[0][0] <= step:
            for request_id, tokens in self._in_flight.popleft()[1].items():
                prompt = self._prompts.get(request_id)
                if prompt is not None:
                    prompt.final_tokens = tokens

    def take(self) -> list[Extend]:
        """Return the announced hand-offs that are new or have more final blocks than at the last call."""
        extended = []
        for request_id, prompt in self._prompts.items():
            count = self._final_blocks(prompt)
            if prompt.announced and (prompt.offered_blocks is None or count > prompt.offered_blocks):
                prompt.offered_blocks = count
                blocks = self._groups.grown(prompt.tables, prompt.final_tokens)
                extended.append(Extend(request_id, prompt.handoff_id, blocks))
        return extended

    def take_ending(self) -> dict[str, list[int]]:
        """Return {hand-off id: all blocks} of the prompts that end in the step begun last.

        None with several groups, whose layers lie over each other: a region is final only with the last one of them.
        """
        ending, self._ending = self._ending, {}
        return ending

    def take_revoked(self) -> list[str]:
        """Return the hand-offs whose blocks vLLM took back or will reuse, since the last call."""
        revoked, self._revoked = self._revoked, []
        return revoked

    def describe(self, request_id: str) -> tuple[str, int]:
        """Return (hand-off id, prompt tokens) of a tracked prompt."""
        prompt = self._prompts[request_id]
        return prompt.handoff_id, prompt.num_tokens

    def complete(self, request_id: str) -> None:
        """Stop tracking a prompt: its hand-off is now published whole."""
        self._prompts.pop(request_id, None)

    def drop(self, request_id: str) -> None:
        """Stop tracking a prompt that ended without a hand-off, and revoke the blocks it has offered."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None and prompt.offered_blocks is not None:
            self._revoked.append(prompt.handoff_id)

    def _announce(self, scheduled: list[str]) -> list[str]:
        room = MOST_PARTIAL - sum(prompt.announced for prompt in self._prompts.values())
        chosen = [request_id for request_id in scheduled if request_id in self._prompts][: max(0, room)]
        for request_id in chosen:
            self._prompts[request_id].announced = True
        return chosen

    def _restart(self, request_id: str) -> None:
        """Drop a preempted prompt, which lost its blocks: its fetches fail, and its second attempt has no overlap."""
        self.drop(request_id)
        for _, reached in self._in_flight:
            reached.pop(request_id, None)

    def _final_blocks(self, prompt: _Prompt) -> int:
        """Return how many blocks to offer; no more once the prompt is computed, because `publish` comes next."""
        if prompt.final_tokens >= prompt.num_tokens:
            return prompt.offered_blocks or 0
        return self._groups.num_grown(prompt.final_tokens)
