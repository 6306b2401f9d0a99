"""The record of one request, which is one line of records.jsonl."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

GIVEN_UP = "no complete answer within the deadline"
"""How the error of a request begins that took too long."""


class RequestRecord(msgspec.Struct, frozen=True):
    """One request as its client saw it. Times are in seconds; those after `sent_s` count from when it was sent.

    The TTFT of figures and SLOs is `ttft_scheduled_s`, so that a late client does not flatter the server.
    """

    index: int
    scheduled_s: float
    sent_s: float
    input_tokens: int
    output_tokens: int = 0
    requested_output_tokens: int = 0
    ttft_s: float | None = None
    second_token_s: float | None = None
    latency_s: float | None = None
    itls_s: tuple[float, ...] = ()
    finish_reason: str | None = None
    status: int | None = None
    error: str | None = None
    in_window: bool = True
    """Whether it was due while new sessions began. Later ones meet a load that falls, so figures leave them out."""

    @property
    def ok(self) -> bool:
        """Whether the request finished: everything asked for came, without an error."""
        return self.error is None

    @property
    def was_given_up(self) -> bool:
        """Whether it failed by taking longer than its client would wait."""
        return self.error is not None and self.error.startswith(GIVEN_UP)

    @property
    def send_lag_s(self) -> float:
        """Seconds by which the request was sent late; if large, the client and not the server set the pace."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_scheduled_s(self) -> float | None:
        """TTFT from the scheduled time, as MLPerf's LoadGen counts it."""
        return None if self.ttft_s is None else self.ttft_s + max(0.0, self.send_lag_s)

    @property
    def e2el_s(self) -> float | None:
        """Seconds from the scheduled time to the last chunk."""
        return None if self.latency_s is None else self.latency_s + max(0.0, self.send_lag_s)

    @property
    def ttst_s(self) -> float | None:
        """Seconds from the first chunk to the second; None for a single chunk."""
        if self.second_token_s is None or self.ttft_s is None:
            return None
        return self.second_token_s - self.ttft_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token as vLLM defines it, in seconds; None for a single token."""
        if self.ttft_s is None or self.latency_s is None or self.output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def largest_gap_s(self) -> float | None:
        """The longest time between two chunks of the answer, in seconds; None for a single chunk."""
        return max(self.itls_s, default=None)

    def meets(self, ttft_s: float, tpot_s: float, gap_s: float) -> bool:
        """Return whether this request is goodput. As in vLLM, one with a single output token has no TPOT to miss."""
        if not self.ok or self.ttft_scheduled_s is None:
            return False
        is_steady = (self.tpot_s or 0.0) <= tpot_s and (self.largest_gap_s or 0.0) <= gap_s
        return self.ttft_scheduled_s <= ttft_s and is_steady

    def as_line(self, **labels: str | int) -> bytes:
        """Return one JSON line, with derived figures and the labels of the run."""
        derived = {
            "send_lag_s": self.send_lag_s,
            "ttft_scheduled_s": self.ttft_scheduled_s,
            "tpot_s": self.tpot_s,
        }
        return msgspec.json.encode(labels | msgspec.to_builtins(self) | derived) + b"\n"


def counted(records: Iterable[RequestRecord]) -> tuple[RequestRecord, ...]:
    """Return the records that figures and attainment are made of: without those that were due after the window."""
    return tuple(record for record in records if record.in_window)


class RecordFile:
    """Appends records to a file as their requests end, so that a run that is stopped keeps what it has seen."""

    def __init__(self, path: Path, **labels: str | int) -> None:
        self._path = path
        self._labels = labels
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            with path.open("ab") as lines:  # the last line was cut when its process was killed
                lines.write(b"\n")

    def add(self, record: RequestRecord) -> None:
        """Append one line; it is in the file when this returns."""
        with self._path.open("ab") as lines:
            lines.write(record.as_line(**self._labels))
