"""Asks a server for its models, and opens the HTTP client for everything that is not load: models, /metrics."""

import asyncio
import os
import time
from dataclasses import dataclass, replace

import httpx
import msgspec

from ridgeline.loadtest.errors import ServerError
from ridgeline.loadtest.plan import ReplayPlan
from ridgeline.loadtest.run.client.stream import Completion, LoadClient, encode_body
from ridgeline.loadtest.trace.prompts import PART, SAMPLE_PARTS, is_at_hand, sample_text

KEY_VARIABLE = "RIDGELINE_API_KEY"
METRICS_KEY_VARIABLE = "RIDGELINE_METRICS_KEY"
"""The environment variable with the key that /metrics asks for, if it does."""
BORDER_TOKENS = 2
"""Each end of a text may or may not share a token with the template, so what is added varies by so many."""
CERTAIN_SHARE = 0.9
"""Of the model's context: a prompt whose length is approximate is no longer than all of it."""
TTFT_HEADER, TPOT_HEADER = "x-ridgeline-ttft-ms", "x-ridgeline-tpot-ms"
"""With these a request tells its limits to Ridgeline, which serves by them in mode adaptive."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Where requests go: one base URL, or several plain servers that get them in turn."""

    urls: tuple[str, ...]
    key_variable: str = KEY_VARIABLE
    """The environment variable with their API key."""
    also: tuple[tuple[str, str], ...] = ()
    """Further HTTP headers of every request, such as the limits that it must meet."""
    engines: tuple[str, ...] = ()
    """The base URLs of engines behind them that publish /metrics of their own."""
    are_others: bool = False
    """Whether somebody else runs them, who gets no key of Ridgeline's /metrics."""

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers of every request: that with their API key, if there is one, and the further ones."""
        return key_headers(self.key_variable) | dict(self.also)

    @property
    def counted(self) -> str | None:
        """The base URL whose /metrics count everything that is sent; None if it is spread over several servers."""
        return self.urls[0] if len(self.urls) == 1 else None

    @property
    def metrics_urls(self) -> tuple[str, ...]:
        """The base URLs whose /metrics say what the servers did."""
        return tuple(dict.fromkeys((*self.urls, *self.engines)))

    def open_first(self) -> httpx.AsyncClient:
        """Open a client of the first server, which stands for all in what is not load."""
        return self.open(self.urls[0])

    def open(self, url: str) -> httpx.AsyncClient:
        """Open a client of one of them."""
        return open_http(url, self.key_variable, are_others=self.are_others)


def as_servers(server: str | Servers) -> Servers:
    """Return a single base URL as servers with Ridgeline's key."""
    return Servers((server,)) if isinstance(server, str) else server


def with_slo_headers(server: str | Servers, ttft_ms: float, tpot_ms: float) -> Servers:
    """Return the servers, with these limits told in every request."""
    return replace(as_servers(server), also=((TTFT_HEADER, f"{ttft_ms:g}"), (TPOT_HEADER, f"{tpot_ms:g}")))


class ModelCard(msgspec.Struct):
    """The part of GET /v1/models that a load test needs, and what was measured of the model's prompts."""

    id: str
    root: str | None = None
    max_model_len: int | None = None
    least_prompt_tokens: int = 1
    """The most tokens of a prompt of one token; for a text they count what the server adds, such as its template."""
    tokens_per_part: float | None = None
    """What the server counts for a `trace.prompts.PART` of a text; None if a tokenizer makes the prompts."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Say how the prompts differ from the trace's."""
        if self.tokens_per_part is None:
            return ()
        return ("prompts' lengths are approximate: without the tokenizer they are made by the server's own counts",)


class _ModelList(msgspec.Struct):
    data: list[ModelCard]


def key_headers(variable: str = KEY_VARIABLE) -> dict[str, str]:
    """Return the HTTP header with the API key in this environment variable; empty without one."""
    key = os.environ.get(variable, "").strip()
    return {"authorization": f"Bearer {key}"} if key else {}


def open_http(base_url: str, key_variable: str = KEY_VARIABLE, *, are_others: bool = False) -> httpx.AsyncClient:
    """Open a client without limits of its own; deadlines are per request."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers, auth = key_headers(key_variable), None if are_others else with_metrics_key
    return httpx.AsyncClient(
        base_url=base_url, timeout=None, limits=limits, trust_env=False, headers=headers, auth=auth
    )


def with_metrics_key(request: httpx.Request) -> httpx.Request:
    """Return the request, to /metrics with the key of that page if there is one."""
    if request.url.path.endswith("/metrics"):
        request.headers.update(key_headers(METRICS_KEY_VARIABLE))
    return request


async def first_model(http: httpx.AsyncClient, name: str | None = None, key_variables: str = KEY_VARIABLE) -> ModelCard:
    """Return the first served model, or the one called `name`. Raises ServerError if there is none.

    `key_variables` are those that may hold the key, as a sentence names them.
    """
    try:
        response = await http.get("/v1/models", timeout=30.0)
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise ServerError(f"{http.base_url} asks for an API key: set {key_variables} to one that it knows")
        response.raise_for_status()
        cards = msgspec.json.decode(response.content, type=_ModelList).data
    except (httpx.HTTPError, ValueError) as error:
        reason = _reason(error)
        raise ServerError(f"no OpenAI-compatible server answers at {http.base_url}: {reason}") from error
    card = next((card for card in cards if name in (None, card.id)), None)
    if card is None:
        served = ", ".join(card.id for card in cards) or "none"
        raise ServerError(f"{http.base_url} does not serve '{name or 'any model'}'; it serves {served}")
    return card


async def served_model(http: httpx.AsyncClient, servers: Servers, plan: ReplayPlan) -> ModelCard:
    """Return the plan's model; if prompts are sent as text, a first request shows how short they can be.

    A second one shows how many tokens a text has, if the tokenizer is not at hand. Raises ServerError.
    """
    card = await first_model(http, plan.served_model_name, servers.key_variable)
    if not plan.sends_text:
        return card
    one = await _counted_tokens(servers, plan, card, "a")
    card = msgspec.structs.replace(card, least_prompt_tokens=one + BORDER_TOKENS if one > 1 else 1)
    if await asyncio.to_thread(is_at_hand, plan.tokenizer or card.root):
        return card
    longest = card.max_model_len
    sample = sample_text(SAMPLE_PARTS if longest is None else min(SAMPLE_PARTS, max(1, longest // 4)))
    tokens = await _counted_tokens(servers, plan, card, "a" + sample) - one
    if tokens <= 0:
        raise ServerError(
            "the server does not count a prompt's tokens (usage.prompt_tokens), so prompts of given lengths need its "
            "model's tokenizer: pass --tokenizer PATH"
        )
    held = None if longest is None else int(longest * CERTAIN_SHARE)
    return msgspec.structs.replace(card, tokens_per_part=tokens / len(PART.findall(sample)), max_model_len=held)


async def _counted_tokens(servers: Servers, plan: ReplayPlan, card: ModelCard, text: str) -> int:
    """Return the tokens that the server counts for a prompt, with its template; 1 if it does not say."""
    request = Completion(0, 0.0, 1, 1, encode_body(card.id, text, 1, plan.endpoint))
    async with LoadClient(servers.urls[:1], servers.headers, plan.endpoint) as client:
        record = await client.complete(request, time.perf_counter(), plan.deadline_s)
    if not record.ok:
        raise ServerError(f"a first request, of {len(text)} letters, failed: {record.error}")
    return record.input_tokens


def _reason(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"GET /v1/models gets HTTP {error.response.status_code}"
    if isinstance(error, ValueError):
        return "GET /v1/models gets no list of models"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
