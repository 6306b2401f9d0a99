"""Who may use the operator's paths. `router.front.middleware.auth` asks before anything else of a request is read.

These are the routes of `ridgeline.router.front.admin`, which can end the service. A client's key never opens them. If
`security.admin_keys_file` is set, its keys do, from anywhere. Otherwise a caller on the server's own machine may use
them, but only while nobody else can look like one: not if clients have keys or come through proxies, and not if the
request shows that it was forwarded.

A browser names the page that asks in `Origin`. Only this server's own page may ask: its origin is the scheme and `Host`
of the request. Behind a proxy that ends TLS the page's scheme is https and the request's is http, so with admin keys
https is taken too, if the proxy passes `Host` on. That opens nothing: a page of others has no admin key, and no browser
adds one by itself. Without admin keys being here is the right itself, so only the exact origin counts, and `Host` must
be a loopback name: a page whose own name was made to resolve to this machine is still a page of others.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from ridgeline.contracts.rpc.address import is_loopback
from ridgeline.router.client_identity import hash_key
from ridgeline.router.front.http.context import AdminRight
from ridgeline.router.front.http.errors import CHALLENGE, HttpRefusal
from ridgeline.router.front.http.types import Scope

ADMIN_PATH: Final = "/ridgeline"
LOAD_ADAPTER_PATH: Final = "/v1/load_lora_adapter"
UNLOAD_ADAPTER_PATH: Final = "/v1/unload_lora_adapter"
_PASSED_ON: Final = frozenset({b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"forwarded", b"via"})
_OWN: Final[tuple[list[str], ...]] = ([], ["same-origin"], ["none"])
"""`Sec-Fetch-Site` of what is no page, of the server's own page, and of an address that a person has entered. A page of
somebody else sends no `Origin` with a GET that it cannot read, but could hold slots of streams."""
_SET_FILE: Final = "set security.admin_keys_file and send a key of that file"


@dataclass(frozen=True)
class AdminAccess:
    """The rule described above. `clients_are_remote`: clients have keys or come through proxies."""

    key_hashes: Set[bytes] = frozenset()
    clients_are_remote: bool = False

    def right(self, scope: Scope, shown_keys: tuple[bytes, ...]) -> AdminRight:
        """Return the caller's right. Raises HttpRefusal (401, 403)."""
        headers = {name for name, _ in scope["headers"]}
        if _values(scope, b"sec-fetch-site") not in _OWN or (b"origin" in headers and not self._from_own_page(scope)):
            raise HttpRefusal(
                HTTPStatus.FORBIDDEN,
                "only the server's own page in a browser may use the operator's paths: open GET / at the address that "
                "`Host` names, which a proxy must pass on",
            )
        if self.key_hashes:
            if any(hash_key(key) in self.key_hashes for key in shown_keys):
                return "key"
            raise HttpRefusal(
                HTTPStatus.UNAUTHORIZED,
                "This path needs an admin key, which is not a client's key: send one of security.admin_keys_file as "
                "`Authorization: Bearer KEY` (ridgeline drain --admin-key-file FILE).",
                headers=CHALLENGE,
            )
        if self.clients_are_remote:
            raise HttpRefusal(
                HTTPStatus.FORBIDDEN,
                "without admin keys this path is closed where clients have keys or come through proxies, since they "
                f"could look like operators: {_SET_FILE}",
            )
        if _from_this_machine(scope) and not headers & _PASSED_ON:
            return "local"
        raise HttpRefusal(
            HTTPStatus.FORBIDDEN,
            f"without admin keys this is answered to callers on the server's own machine only: {_SET_FILE}",
        )

    def _from_own_page(self, scope: Scope) -> bool:
        schemes = {scope["scheme"], "https"} if self.key_hashes else {scope["scheme"]}
        hosts = _values(scope, b"host")
        return len(hosts) == 1 and _values(scope, b"origin") in [[f"{scheme}://{hosts[0]}"] for scheme in schemes]


def is_admin_path(path: str) -> bool:
    """Return whether the path is one of the operator's, whether it exists or not."""
    return path in (ADMIN_PATH, LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH) or path.startswith(f"{ADMIN_PATH}/")


def _from_this_machine(scope: Scope) -> bool:
    """Check the socket's real peer, which no header changes, and the host name that the caller used.

    The name excludes web pages whose own host name was made to resolve to this machine.
    """
    client = scope.get("client")
    hosts = _values(scope, b"host")
    if client is None or len(hosts) != 1:
        return False
    return is_loopback(str(client[0])) and is_loopback(_without_port(hosts[0]))


def _values(scope: Scope, header: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == header]


def _without_port(host: str) -> str:
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
