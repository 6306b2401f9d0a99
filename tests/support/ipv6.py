"""Tells whether this machine has IPv6."""

import socket


def _here() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


HERE = _here()
