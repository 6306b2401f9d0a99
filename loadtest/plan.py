"""What to run, checked before anything starts. Built by the command line; read by `replay` and `compare`."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

Mode = Literal["colocated", "disaggregated"]
COLOCATED: Mode = "colocated"
DISAGGREGATED: Mode = "disaggregated"
MIN_ROUNDS = 2


class Slo(BaseModel):
    """The two limits a request must meet to count as goodput."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_ms: float = 2000.0
    tpot_ms: float = 100.0

    def __str__(self) -> str:
        return f"TTFT <= {self.ttft_ms:g} ms and TPOT <= {self.tpot_ms:g} ms"


class ReplayPlan(BaseModel):
    """One replay of one trace against one server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trace: str = "demo"
    time_scale: float = 1.0
    rate: float | None = None
    limit: int | None = None
    duration_s: float | None = None
    length_scale: float = 1.0
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    too_long: Literal["clip", "drop"] = "clip"
    jitter_s: float = 0.0
    seed: int = 0
    warmup_requests: int = 2
    deadline_s: float = 120.0
    settle_s: float = 1.0
    slo_ttft_ms: float = 2000.0
    slo_tpot_ms: float = 100.0
    model: str | None = None
    tokenizer: str | None = None

    @property
    def slo(self) -> Slo:
        """The limits as one value."""
        return Slo(ttft_ms=self.slo_ttft_ms, tpot_ms=self.slo_tpot_ms)

    @field_validator("time_scale", "rate", "duration_s", "length_scale", "deadline_s", "slo_ttft_ms", "slo_tpot_ms")
    @classmethod
    def _above_zero(cls, value: float | None) -> float | None:
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"must be a number above 0, not {value:g}")
        return value

    @field_validator("limit", "max_input_tokens", "max_output_tokens")
    @classmethod
    def _at_least_one(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError(f"must be 1 or more, not {value}")
        return value

    @field_validator("jitter_s", "warmup_requests", "settle_s")
    @classmethod
    def _not_negative(cls, value: float) -> float:
        if value < 0:
            raise ValueError(f"must be 0 or more, not {value:g}")
        return value

    @model_validator(mode="after")
    def _one_time_control(self) -> "ReplayPlan":
        if self.rate is not None and self.time_scale != 1:
            raise ValueError("rate and time_scale both rescale time: give one of them")
        return self


class ComparePlan(ReplayPlan):
    """The same trace replayed against both modes, in counterbalanced rounds."""

    rounds: int = MIN_ROUNDS

    @field_validator("rounds")
    @classmethod
    def _enough_rounds(cls, value: int) -> int:
        if value < MIN_ROUNDS:
            raise ValueError(
                f"must be {MIN_ROUNDS} or more, not {value}: after one, the machine's drift looks like a difference"
            )
        return value
