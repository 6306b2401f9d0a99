"""A variant that somebody else runs: an OpenAI-compatible server, or several that get the requests in turn."""

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import httpx

from ridgeline.contracts.former_names import warn_of_former_name
from ridgeline.loadtest.errors import LoadTestError, ServerError
from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.run.client.stream import Completion, LoadClient, encode_body
from ridgeline.loadtest.run.machine import listeners
from ridgeline.loadtest.run.server import ModelCard, Servers, first_model, open_http
from ridgeline.loadtest.trace.prompts import load_text_tokens
from ridgeline.loadtest.variants import Devices, Reached

KEY_VARIABLE, FORMER_KEY_VARIABLE = "RIDGELINE_BASELINE_API_KEY", "RIDGELINE_OPPONENT_API_KEY"
RESET_PATH = "/reset_prefix_cache"
"""vLLM has it if VLLM_SERVER_DEV_MODE is set."""
RESET_WITHIN_S = 30.0
PROBE_WITHIN_S = 120.0
PROBE_TOKENS = 4
PROBE_IDS, PROBE_TEXT = list(range(10, 42)), "one two three four five six seven eight"


@dataclass(slots=True)
class BaselineVariant:
    """Servers that run all the time and are not ours to start, to switch or to stop."""

    mode: str
    servers: Servers
    plan_changes: dict[str, Any]
    """How its requests differ from the plan: endpoint, model, tokenizer, prompts as text."""
    devices: Devices | None = None
    process_ids: frozenset[int] | None = frozenset()
    """Processes on this machine that serve it; None if they cannot be seen."""
    resets_cache: bool = False
    start_s: float = 0.0
    cards: list[ModelCard] = field(default_factory=list)
    _was_ready: bool = False

    async def check(self, plan: ComparePlan, context_tokens: int) -> tuple[str, ...]:
        """Ask every server for its model and for a short answer; return what must be said of it.

        Raises ServerError if one does not serve what the comparison needs, or less context than `context_tokens`.
        """
        asked = plan.model_copy(update=self.plan_changes)
        self.cards = [await self._checked(url, asked, context_tokens) for url in self.servers.urls]
        if len({_names(card) for card in self.cards}) > 1:
            served = " and ".join(card.id for card in self.cards)
            raise ServerError(
                f"the servers of {self.mode} are one variant and must have one model; they serve {served}"
            )
        self.resets_cache = await self._reset_caches()
        return tuple(self._notes(context_tokens))

    async def same_model(self, base_url: str, plan: ComparePlan) -> tuple[str, ...]:
        """Compare its model with the one that our server at `base_url` has; return what must be said of it.

        Raises ServerError if their tokenizers differ: prompts are token ids, and lengths would not be comparable.
        """
        async with open_http(base_url) as http:
            ours = await first_model(http, plan.served_name)
        our_tokenizer, their_tokenizer = plan.tokenizer or ours.root, self.plan_changes.get("tokenizer")
        notes = []
        if their_tokenizer is None:
            self.plan_changes["tokenizer"] = our_tokenizer
            notes.append(f"the prompts of {self.mode} are made with the tokenizer of our model")
        elif our_tokenizer is not None and await asyncio.to_thread(_is_other, our_tokenizer, str(their_tokenizer)):
            raise ServerError(
                f"the tokenizers {our_tokenizer} and {their_tokenizer} differ, so {self.mode} serves another model: "
                "compare servers of the same model"
            )
        if not _names(ours) & _names(self.cards[0]):
            notes.append(
                f"{self.mode} calls its model '{self.cards[0].id}' and we serve '{ours.id}': that they have the same "
                "tokenizer is all that shows that they are the same"
            )
        return tuple(notes)

    async def ready(self) -> Reached:
        """Empty its prefix caches where it lets us. Raises ServerError if it does not answer any more."""
        if self.resets_cache and not await self._reset_caches():
            raise ServerError(f"{self.mode} has not emptied its prefix cache: POST {RESET_PATH} fails")
        is_fresh, self._was_ready = not self._was_ready, True
        is_watched = self.process_ids is not None
        return Reached(self.servers, is_fresh, self.plan_changes, self.process_ids or frozenset(), is_watched)

    async def _checked(self, url: str, plan: ComparePlan, context_tokens: int) -> ModelCard:
        async with open_http(url, self.servers.key_variable) as http:
            card = await first_model(http, plan.served_name, self.servers.key_variable)
        if card.max_model_len is not None and card.max_model_len < context_tokens:
            raise ServerError(
                f"{url} serves contexts of {card.max_model_len} tokens and we {context_tokens}, so they would not get "
                f"the same requests: give both the same, ours by --set model.max_model_len_tokens={card.max_model_len}"
            )
        prompt: list[int] | str = PROBE_TEXT if plan.sends_text else PROBE_IDS
        body = encode_body(card.id, prompt, PROBE_TOKENS, plan.endpoint)
        async with LoadClient(url, self.servers.headers, plan.endpoint) as client:
            request = Completion(0, 0.0, len(prompt), PROBE_TOKENS, body)
            record = await client.complete(request, time.perf_counter(), PROBE_WITHIN_S)
        if not record.ok:
            raise ServerError(f"{url} does not answer as a comparison needs it ({plan.endpoint}): {record.error}")
        return card

    async def _reset_caches(self) -> bool:
        async def reset(url: str) -> bool:
            async with open_http(url, self.servers.key_variable) as http:
                try:
                    return (await http.post(RESET_PATH, timeout=RESET_WITHIN_S)).is_success
                except httpx.HTTPError:
                    return False

        return all(await asyncio.gather(*(reset(url) for url in self.servers.urls)))

    def _notes(self, context_tokens: int) -> list[str]:
        urls = self.servers.urls
        where = urls[0] if len(urls) == 1 else f"{', '.join(urls)}, which get the requests in turn"
        notes = [f"{self.mode}: model '{self.cards[0].id}' at {where}"]
        if self.resets_cache:
            notes.append(f"the prefix cache of {self.mode} is emptied before each round")
        else:
            notes.append(
                f"{self.mode} offers no way to empty its prefix cache: no two rounds share a prompt's beginning, so "
                "that only a round's own prompts can be found there"
            )
        longest = self.cards[0].max_model_len
        if longest is not None and longest > context_tokens:
            notes.append(f"{self.mode} serves contexts of {longest} tokens and we {context_tokens}")
        if self.process_ids is None:
            notes.append(
                f"the processes of {self.mode} on this machine are another user's, so other work is not noticed in its "
                "rounds: --baseline-processes names them"
            )
        return notes


def baseline_of(plan: ComparePlan, unit_of_ours: Devices) -> BaselineVariant:
    """Return the plan's baseline; its devices are of the same kind as ours."""
    changes = {
        "endpoint": plan.baseline_endpoint or plan.endpoint,
        "text_prompts": plan.text_prompts or plan.baseline_text_prompts,
        "served_name": plan.baseline_served_name,
        "tokenizer": plan.baseline_tokenizer,
    }
    count = plan.baseline_devices
    devices = None if count is None else Devices(unit_of_ours.unit, count, {})
    is_former = KEY_VARIABLE not in os.environ and FORMER_KEY_VARIABLE in os.environ
    if is_former:
        warn_of_former_name(FORMER_KEY_VARIABLE, KEY_VARIABLE)
    servers = Servers(plan.baseline_urls, FORMER_KEY_VARIABLE if is_former else KEY_VARIABLE)
    return BaselineVariant(plan.baseline_name, servers, changes, devices, _processes(plan))


def _processes(plan: ComparePlan) -> frozenset[int] | None:
    given = frozenset(plan.baseline_process_ids)
    found = [listeners(url) for url in plan.baseline_urls]
    if any(each is None for each in found) and not given:
        return None
    return given.union(*(each for each in found if each is not None))


def _names(card: ModelCard) -> frozenset[str]:
    """Return what a model is called: its name, and the last part of the folder or hub name that it comes from."""
    return frozenset(PurePath(name).name.lower() for name in (card.id, card.root) if name)


def _is_other(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return False
    try:
        return load_text_tokens(ours) != load_text_tokens(theirs)
    except LoadTestError as error:
        raise ServerError(f"the baseline's tokenizer cannot be compared with ours: {error}") from error
