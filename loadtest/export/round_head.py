"""What an exported round says of the run that it belongs to."""

from datetime import datetime

import msgspec


class RoundHead(msgspec.Struct, frozen=True):
    """What a round's JSON says of the run."""

    began: datetime
    label: str
    model: str | None
    backend: str
    rate: float | None
    """Requests a second; None if all arrive at once."""
    metadata: dict[str, str]
    """Fields of ours, as `--metadata KEY=VALUE` adds them."""
