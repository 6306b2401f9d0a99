"""The certificates of mutual TLS between router and workers: which files, and whether peers would accept each other.

No gRPC in here, so that a command line can judge the files quickly. `ridgeline.contracts.rpc.channel` uses them.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SERVER_NAME: Final = "ridgeline"
"""The DNS name that every certificate must have in its subjectAltName, whatever host it is used on."""

_HANDSHAKE_STEPS: Final = 8
"""More round trips than either version of TLS needs."""


class TlsFileError(ValueError):
    """A certificate or key cannot be used; the message names the file and the fix."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files, the same on every node: the authority, this deployment's certificate, and its key."""

    ca_file: str
    cert_file: str
    key_file: str

    def check(self) -> None:
        """Raise TlsFileError unless two peers with these files would accept each other. Takes milliseconds."""
        self.contents()
        _shake_hands(self._context(ssl.PROTOCOL_TLS_SERVER), self._context(ssl.PROTOCOL_TLS_CLIENT), self.cert_file)

    def contents(self) -> tuple[bytes, bytes, bytes]:
        """Read the three files, in this order. Raises TlsFileError."""
        return _read("ca_file", self.ca_file), _read("cert_file", self.cert_file), _read("key_file", self.key_file)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        try:
            context.load_verify_locations(self.ca_file)
        except ssl.SSLError as error:
            raise TlsFileError(
                f"security.tls.ca_file {self.ca_file} holds no certificate: give the authority's, in PEM."
            ) from error
        try:
            # A password, since OpenSSL would ask the terminal for one.
            context.load_cert_chain(self.cert_file, self.key_file, password="none")
        except ssl.SSLError as error:
            raise TlsFileError(
                f"security.tls.cert_file {self.cert_file} and key_file {self.key_file} are not a certificate and its "
                f"key, both in PEM, the key without a passphrase ({error.reason or error}): make them again as "
                "docs/how-to/secure.md shows."
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
        return context


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise TlsFileError(
            f"security.tls.{name} {path} cannot be read ({error.strerror}): the file must be on every node, at the "
            "same path, readable by the user who runs Ridgeline."
        ) from error


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, cert_file: str) -> None:
    """Perform a whole handshake in memory: it judges chain, name, dates and purposes as a real one will."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=SERVER_NAME),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(_HANDSHAKE_STEPS):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                raise TlsFileError(
                    f"security.tls.cert_file {cert_file} would be refused ({error.verify_message}): it must be signed "
                    f"by ca_file, be valid now, and name DNS:{SERVER_NAME}, as docs/how-to/secure.md shows."
                ) from error
            except ssl.SSLError as error:
                raise TlsFileError(f"security.tls.cert_file {cert_file} cannot be used: {error}") from error
