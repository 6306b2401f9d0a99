"""The words that settings, messages and metric labels share: modes, pools, legs, and a worker's health."""

from __future__ import annotations

from typing import Literal

Mode = Literal["disaggregated", "colocated", "adaptive"]
Pool = Literal["prefill", "decode", "colocated", "adaptive"]
Leg = Literal["prefill", "decode"]
Phase = Literal["prefill", "decode"]
"""A part of a request's computation that a worker may be kept for."""
RebalanceMode = Literal["none", "advise", "act"]
FirstToken = Literal["continue", "resample"]
ErrorKind = Literal["", "invalid", "engine", "handoff", "draining"]
Health = Literal["", "draining", "drained", "actor_died", "engine_died", "stalled", "unreachable", "cut_off"]
"""A worker's health. Replace it unless this is "" (well), "draining" or "drained". An `unreachable` worker does not
answer the supervisor; a `cut_off` one does, but the router cannot reach it."""
RestartReason = Health | Literal["ordered"]
"""Why a worker was started again: what it suffered from, or that an operator wanted it."""
