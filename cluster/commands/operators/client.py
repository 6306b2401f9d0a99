"""Calls to the paths of operators of a running server."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
import msgspec

from ridgeline.cluster.config.api_keys import first_admin_key
from ridgeline.contracts.handoff import UNREADABLE
from ridgeline.loadtest.errors import ServerError

T = TypeVar("T")
ANSWER_WITHIN_S = 30.0
"""More than an answer takes: a drain may wait for another one, and each asks a worker within 10 s and all within 2."""
_LOOK: Final = {"/ridgeline/drain": "GET /ridgeline/workers", "/ridgeline/mode": "`ridgeline mode`"}
"""Where to see whether a request was accepted, if not in the operation that it begins or cancels."""


class NoAnswer(ServerError):
    """Nobody answered; the request may have been received."""


class OperationRefused(ServerError):
    """The server has answered, and says why it does not do it."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


def operator_client(url: str, admin_key_file: Path | None) -> httpx.AsyncClient:
    """Return a client that sends the file's first admin key, if there is a file. Raises ApiKeyError."""
    headers = {"Authorization": f"Bearer {first_admin_key(str(admin_key_file))}"} if admin_key_file else {}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=ANSWER_WITHIN_S, trust_env=False)


async def ask(
    client: httpx.AsyncClient,
    method: str,
    path: str,
    kind: type[T],
    body: dict[str, Any] | None = None,
    within_s: float = ANSWER_WITHIN_S,
) -> T:
    """Return the server's answer. Raises ServerError with the server's own sentence, NoAnswer if there is none.

    Another program may listen there, so an answer that is no `kind` is a ServerError too.
    """
    try:
        response = await client.request(method, path, json=body, timeout=within_s)
        if response.is_success:
            return msgspec.json.decode(response.content, type=kind)
        raise refusal(response)
    except httpx.TimeoutException as error:
        look = _LOOK.get(path, "GET /ridgeline/operation")
        done = f", but the request may have been accepted: look at {look} before you repeat it" * (method != "GET")
        raise NoAnswer(f"no answer from {client.base_url} within {within_s:.0f} s{done}") from error
    except httpx.TransportError as error:
        raise NoAnswer(
            f"no answer from {client.base_url}: {error or type(error).__name__}; is the server running?"
        ) from error
    except UNREADABLE as error:
        raise ServerError(f"{client.base_url} answers {path} in another form than this version: {error}") from error


def refusal(response: httpx.Response) -> OperationRefused:
    """Return the error that an answer tells of."""
    return OperationRefused(_sentence(response), response.status_code)


def _sentence(response: httpx.Response) -> str:
    """Return the server's own message, if it has one."""
    if response.status_code == httpx.codes.UNAUTHORIZED:
        return (
            "the server asks for an admin key: say --admin-key-file with the file that its security.admin_keys_file "
            "names"
        )
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = ""
    return (
        message or f"{response.request.url} answers {response.status_code}: is it a Ridgeline server of this version?"
    )
