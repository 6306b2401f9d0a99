"""The one table of which handler runs which leg.

Here, since only `cluster` may know both roles. Every worker gets the whole table: which legs it is sent is the router's
decision, and may change while it serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ridgeline.contracts.vocabulary import Leg
from ridgeline.decode_worker.handler import DecodeHandler
from ridgeline.prefill_worker.handler import PrefillHandler
from ridgeline.worker_runtime.host import Handler

HANDLERS: Final[Mapping[Leg, Handler]] = {"prefill": PrefillHandler(), "decode": DecodeHandler()}
"""Handlers keep nothing, so workers may share one. A whole replica runs a request as decode does without a hand-off."""
