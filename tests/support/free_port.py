"""A port for a server that binds it later, seconds after it was chosen."""

from __future__ import annotations

import random
import socket

PORTS = range(20_000, 32_000)
"""Below those that Linux gives to whoever wants any port, and above those of Ray's workers."""


def free_port() -> int:
    """Return one that nobody has on 127.0.0.1, and that only somebody who names it will take."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free")
