"""Every gRPC port and channel of Ridgeline is made here, in plain text or with mutual TLS.

With `TlsFiles` a server takes only peers that show a certificate of the same authority, and a client trusts only such a
server. Workers come and go on addresses that no certificate could list, so every certificate names the same
`SERVER_NAME`, and what is trusted is the authority. The files are read whenever a port or a channel is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import grpc
import grpc.aio

from ridgeline.contracts.rpc.tls import SERVER_NAME, TlsFiles

GrpcOptions = Sequence[tuple[str, Any]]
NO_PROXY: Final = (("grpc.enable_http_proxy", 0),)
"""The processes of a deployment reach each other directly. gRPC would send even what goes to this machine through the
proxy that a company's shell names (http_proxy, https_proxy, grpc_proxy), and Ray sets the same option for its own."""


def add_port(server: Any, address: str, tls: TlsFiles | None) -> int:
    """Have a gRPC server, synchronous or asynchronous, listen on host:port; returns the port.

    Raises RuntimeError if it is taken, TlsFileError if a file cannot be read.
    """
    if tls is None:
        return int(server.add_insecure_port(address))
    ca, certificate, key = tls.contents()
    credentials = grpc.ssl_server_credentials([(key, certificate)], root_certificates=ca, require_client_auth=True)
    return int(server.add_secure_port(address, credentials))


def open_channel(address: str, options: GrpcOptions, tls: TlsFiles | None) -> grpc.Channel:
    """Open a channel of the synchronous API; it connects when first used. Raises TlsFileError."""
    if tls is None:
        return grpc.insecure_channel(address, options=[*options, *NO_PROXY])
    return grpc.secure_channel(address, _credentials(tls), options=_named(options))


def open_aio_channel(address: str, options: GrpcOptions, tls: TlsFiles | None) -> grpc.aio.Channel:
    """Open a channel of the asynchronous API; it connects when first used. Raises TlsFileError."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=[*options, *NO_PROXY])
    return grpc.aio.secure_channel(address, _credentials(tls), options=_named(options))


def why_refused(details: str | None) -> str:
    """Return gRPC's account of a failed connection, with what to check if the two sides could not agree on TLS."""
    text = details or "no details"
    if "handshake failed" in text:
        return f"{text} (the other side is not trusted: are security.tls and its files the same for both?)"
    if "Socket closed" in text and "failed to connect" in text:
        return f"{text} (the other side hung up: does it ask for a certificate, security.tls, of another authority?)"
    return text


def _credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    ca, certificate, key = tls.contents()
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=certificate)


def _named(options: GrpcOptions) -> list[tuple[str, Any]]:
    return [*options, *NO_PROXY, ("grpc.ssl_target_name_override", SERVER_NAME)]
