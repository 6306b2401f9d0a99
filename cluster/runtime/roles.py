"""The one table of which handler runs which leg, by pool. Used by `cluster.runtime.services`.

Here, since only `cluster` may know both roles: `worker_runtime.host` is given one row and refuses every leg that is not
in it. To give a pool another leg, or a worker another pool, is to use another row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from contracts.vocabulary import Leg, Pool
from decode_worker.handler import DecodeHandler
from prefill_worker.handler import PrefillHandler
from worker_runtime.host import Handler

HANDLERS: Final[Mapping[Pool, Mapping[Leg, Handler]]] = {
    "prefill": {"prefill": PrefillHandler()},
    "decode": {"decode": DecodeHandler()},
    "colocated": {"decode": DecodeHandler()},
}
"""Handlers keep nothing, so workers may share one. A whole replica runs a request as decode does without a hand-off."""
