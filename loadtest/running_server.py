"""A variant that somebody else runs: an OpenAI-compatible server, or several that get the requests in turn."""

import asyncio
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

import httpx

from ridgeline.loadtest.errors import ServerError
from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.run.client.stream import Completion, LoadClient, encode_body
from ridgeline.loadtest.run.machine import serving_processes
from ridgeline.loadtest.run.server import KEY_VARIABLE, ModelCard, Servers, first_model
from ridgeline.loadtest.run.server_facts import ServerFacts, ask_facts, together
from ridgeline.loadtest.run.server_metrics import scrape
from ridgeline.loadtest.variants import Devices, Reached

RESET_PATH = "/reset_prefix_cache"
"""vLLM has it if VLLM_SERVER_DEV_MODE is set."""
RESET_WITHIN_S = 30.0
PROBE_WITHIN_S = 120.0
PROBE_TOKENS = 4
PROBE_IDS, PROBE_TEXT = list(range(10, 42)), "one two three four five six seven eight"


@dataclass(slots=True)
class RunningServer:
    """Servers that run all the time and are not ours to start, to switch or to stop."""

    mode: str
    """Its name."""
    servers: Servers
    devices: Devices | None = None
    card: ModelCard | None = None
    """Its model; `check` asks for it."""
    facts: ServerFacts = field(default_factory=ServerFacts)
    """The settings of its engines, as far as they say them; `check` asks for them."""
    resets_cache: bool = False
    start_s: float = 0.0
    _was_ready: bool = False

    @property
    def context_tokens(self) -> int | None:
        """The longest request that it serves; known after `check`."""
        return None if self.card is None else self.card.max_model_len

    async def check(self, plan: ComparePlan) -> tuple[str, ...]:
        """Ask every server for its model and for a short answer; return what must be said of it.

        Raises ServerError if one does not answer as the comparison needs it, or if they serve different models.
        """
        cards = [await self._checked(url, plan) for url in self.servers.urls]
        if len({_names(card) for card in cards}) > 1:
            served = " and ".join(card.id for card in cards)
            raise ServerError(
                f"the servers of {self.mode} are one variant and must have one model; they serve {served}"
            )
        self.card = cards[0]
        told = []
        for url in self.servers.metrics_urls:
            async with self.servers.open(url) as http:
                told.append(await ask_facts(http, await scrape(http, foreign=True)))
        self.facts = together(told)
        self.resets_cache = await self._reset_caches()
        where = ", ".join(self.servers.urls) + (", which get the requests in turn" if len(cards) > 1 else "")
        notes = [f"{self.mode}: model '{self.card.id}' at {where}"]
        if self.resets_cache:
            notes.append(f"the prefix cache of {self.mode} is emptied before each round")
        if await asyncio.to_thread(serving_processes, self.servers.metrics_urls) is None:
            notes.append(
                f"the processes of {self.mode} on this machine are another user's, so other work is not noticed in its "
                "rounds"
            )
        return tuple(notes)

    async def ready(self, why: str = "") -> Reached:
        """Empty its prefix caches where it lets us. Raises ServerError if it does not answer any more."""
        if self.resets_cache and not await self._reset_caches():
            raise ServerError(f"{self.mode} has not emptied its prefix cache: POST {RESET_PATH} fails")
        is_fresh, self._was_ready = not self._was_ready, True
        found = await asyncio.to_thread(serving_processes, self.servers.metrics_urls)
        changes: dict[str, Any] = {} if self.card is None else {"served_model_name": self.card.id}
        return Reached(self.servers, is_fresh, changes, found or frozenset(), is_watched=found is not None)

    async def _checked(self, url: str, plan: ComparePlan) -> ModelCard:
        async with self.servers.open(url) as http:
            card = await first_model(http, plan.served_model_name, self._key_variables)
        prompt: list[int] | str = PROBE_TEXT if plan.sends_text else PROBE_IDS
        body = encode_body(card.id, prompt, PROBE_TOKENS, plan.endpoint)
        async with LoadClient((url,), self.servers.headers, plan.endpoint) as client:
            request = Completion(0, 0.0, len(prompt), PROBE_TOKENS, body)
            record = await client.complete(request, time.perf_counter(), PROBE_WITHIN_S)
        if not record.ok:
            raise ServerError(f"{url} does not answer as a comparison needs it ({plan.endpoint}): {record.error}")
        return card

    @property
    def _key_variables(self) -> str:
        """The variables that may hold its key: its own alone if that is set."""
        own = _own_key_variable(self.mode)
        return own if self.servers.key_variable == own else f"{own}, or {KEY_VARIABLE} for all servers,"

    async def _reset_caches(self) -> bool:
        async def reset(url: str) -> bool:
            async with self.servers.open(url) as http:
                try:
                    return (await http.post(RESET_PATH, timeout=RESET_WITHIN_S)).is_success
                except httpx.HTTPError:
                    return False

        return all(await asyncio.gather(*(reset(url) for url in self.servers.urls)))


def running_servers(plan: ComparePlan, unit: Literal["core", "GPU"] = "GPU") -> list[RunningServer]:
    """Return the plan's running servers; `unit` is what their devices are."""

    def devices(name: str) -> Devices | None:
        return Devices(unit, plan.devices_of[name], {}) if name in plan.devices_of else None

    return [
        RunningServer(
            name,
            Servers(urls, key_variable_of(name), engines=plan.engines_of.get(name, ()), are_others=True),
            devices(name),
        )
        for name, urls in plan.servers.items()
    ]


def key_variable_of(name: str) -> str:
    """Return the environment variable with a server's API key: one of its own if it is set, else everybody's."""
    own = _own_key_variable(name)
    return own if own in os.environ else KEY_VARIABLE


def _own_key_variable(name: str) -> str:
    return f"{KEY_VARIABLE}_{re.sub(r'[^A-Z0-9]', '_', name.upper())}"


def note_models(cards: Mapping[str, ModelCard]) -> tuple[str, ...]:
    """Return what must be said of the models of all variants: other names, and contexts of other lengths."""
    first, *_ = cards
    notes = [
        f"{name} calls its model '{card.id}' and {first} '{cards[first].id}': only you know that they are the same"
        for name, card in cards.items()
        if not _names(card) & _names(cards[first])
    ]
    lengths = {name: card.max_model_len for name, card in cards.items() if card.max_model_len is not None}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        notes.append(f"contexts, in tokens: {told}; no request is longer than the shortest")
    return tuple(notes)


def _names(card: ModelCard) -> frozenset[str]:
    """Return what a model is called: its name, and the last part of the folder or hub name that it comes from."""
    return frozenset(PurePath(name).name.lower() for name in (card.id, card.root) if name)
