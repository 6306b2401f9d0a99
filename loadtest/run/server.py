"""Asks a server for its models, and opens the HTTP client for everything that is not load: models, /metrics.

Called by `loadtest.run.replay`, `loadtest.run.unloaded` and `cluster.commands.top`.
"""

import os

import httpx
import msgspec

from loadtest.errors import ServerError

KEY_VARIABLE = "RIDGELINE_API_KEY"


class ModelCard(msgspec.Struct):
    """The part of GET /v1/models that a load test needs."""

    id: str
    root: str | None = None
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[ModelCard]


def key_headers() -> dict[str, str]:
    """Return the HTTP header with the API key in RIDGELINE_API_KEY; empty without one."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    return {"authorization": f"Bearer {key}"} if key else {}


def open_http(base_url: str) -> httpx.AsyncClient:
    """Open a client without limits of its own; deadlines are per request."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=base_url, timeout=None, limits=limits, trust_env=False, headers=key_headers())


async def first_model(http: httpx.AsyncClient, name: str | None = None) -> ModelCard:
    """Return the first served model, or the one called `name`. Raises ServerError if there is none."""
    try:
        response = await http.get("/v1/models", timeout=30.0)
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise ServerError(f"{http.base_url} asks for an API key: set {KEY_VARIABLE} to one that it knows")
        response.raise_for_status()
        cards = msgspec.json.decode(response.content, type=_ModelList).data
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ServerError(f"no OpenAI-compatible server answers at {http.base_url}: {reason}") from error
    card = next((card for card in cards if name in (None, card.id)), None)
    if card is None:
        served = ", ".join(card.id for card in cards) or "none"
        raise ServerError(f"{http.base_url} does not serve '{name or 'any model'}'; it serves {served}")
    return card
