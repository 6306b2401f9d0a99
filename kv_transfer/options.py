"""The settings of the hand-off, in one object from the plan of a deployment to the fetcher of each rank.

`ridgeline.engine.config` carries it to the engine's process, `ridgeline.kv_transfer.service` to both ends of the
transport. A setting of its own for a transport is a field here, and nothing on the way knows of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.contracts.rpc.tls import TlsFiles
from ridgeline.kv_transfer.names import TransportName


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """What the ranks of one engine are told about exchanging KV with peers. Plain values, since it travels as JSON."""

    host: str
    """The interface peers and routers reach this engine's worker on."""
    port: int = 0
    """Where the source listens; 0: any free port."""
    transport: TransportName = "auto"
    """What its own fetches use, `auto` picks for each source; others may use anything that it offers."""
    lease_s: float = 30.0
    """How long a hand-off that nobody fetches or renews stays pinned."""
    kv_fetch_timeout_s: float = 30.0
    faults: str | None = None
    """For tests: makes its own fetches fail as planned, see `ridgeline.kv_transfer.faults`."""
    tls: TlsFiles | None = None
    """For every connection with peers and routers; None: plain text."""
