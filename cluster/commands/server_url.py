"""The URL of a running server, as an option of the commands that ask one."""

from __future__ import annotations

from urllib.parse import urlsplit

import typer


def server_url(text: str) -> str:
    """Strip a slash or /v1 from the end of the URL. Raises typer.BadParameter, which ends the command."""
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise typer.BadParameter(
            f"{text!r} is no URL of a server: write it as http://127.0.0.1:8000, an IPv6 address as http://[::1]:8000"
        )
    return text.rstrip("/").removesuffix("/v1")
