"""Who may use the operator's paths. Asked by `router.front.middleware.auth` before anything of such a request is read.

Those are the paths of `router.front.admin`, with which the service can be ended. A client's key never opens them. With
`security.admin_keys_file` its keys do, from wherever. Without it a caller on the server's own machine may, but only as
long as nobody else can look like one: not if clients have keys or come through proxies, and not if the request shows
that it was passed on, or comes from a page in a browser.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Literal

from contracts.rpc.address import is_loopback
from router.client_identity import hash_key
from router.front.middleware.types import Scope

ADMIN_PATH: Final = "/ridgeline"
AdminRight = Literal["", "local", "key"]
"""Nothing; a caller on this machine; a caller who has shown an admin key."""
_PASSED_ON: Final = frozenset({b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"forwarded", b"via"})
_SET_FILE: Final = "set security.admin_keys_file and send a key of that file"


@dataclass(frozen=True)
class AdminRefusal:
    """What the caller is told."""

    status: HTTPStatus
    sentence: str


@dataclass(frozen=True)
class AdminAccess:
    """The rule above. `clients_are_remote`: they have keys or come through proxies."""

    key_hashes: frozenset[bytes] = frozenset()
    clients_are_remote: bool = False

    def right(self, scope: Scope, shown_keys: tuple[bytes, ...]) -> AdminRight | AdminRefusal:
        """What this caller may do, or why nothing."""
        headers = {name for name, _ in scope["headers"]}
        if b"origin" in headers:
            return AdminRefusal(HTTPStatus.FORBIDDEN, "a page in a browser may not use the paths of operators")
        if self.key_hashes:
            if any(hash_key(key) in self.key_hashes for key in shown_keys):
                return "key"
            return AdminRefusal(
                HTTPStatus.UNAUTHORIZED,
                "This path needs an admin key, which is not a client's key: send one of security.admin_keys_file as "
                "`Authorization: Bearer KEY` (ridgeline drain --admin-key-file FILE).",
            )
        if self.clients_are_remote:
            return AdminRefusal(
                HTTPStatus.FORBIDDEN,
                "without admin keys this path is closed where clients have keys or come through proxies, since they "
                f"could look like operators: {_SET_FILE}",
            )
        if _from_this_machine(scope) and not headers & _PASSED_ON:
            return "local"
        return AdminRefusal(
            HTTPStatus.FORBIDDEN,
            f"without admin keys this is answered to callers on the server's own machine only: {_SET_FILE}",
        )


def is_admin_path(path: str) -> bool:
    """Whether a path belongs to the operator, existing or not."""
    return path == ADMIN_PATH or path.startswith(f"{ADMIN_PATH}/")


def _from_this_machine(scope: Scope) -> bool:
    """By the socket's real peer, which no header changes, and by the name that the caller knows the server by: a page
    whose own name has been made to lead here has that one."""
    client = scope.get("client")
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    if client is None or len(hosts) != 1:
        return False
    return is_loopback(str(client[0])) and is_loopback(_without_port(hosts[0]))


def _without_port(host: str) -> str:
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
