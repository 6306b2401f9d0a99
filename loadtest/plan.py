"""The settings of a run, checked before anything starts.

Each field is an option of the commands, and its docstring is the help text (`ridgeline.cluster.cli`).
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self, cast, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Mode = Literal["colocated", "disaggregated", "adaptive"]
COLOCATED: Mode = "colocated"
DISAGGREGATED: Mode = "disaggregated"
MODES: tuple[Mode, ...] = get_args(Mode)
MOST_VARIANTS: Final = 6
"""As many as the page has colours for."""
PAIRS_AT_A_RATE: Final = 8
MOST_PAIRS_OF_A_SEARCH: Final = 36
AUTO: Final = "auto"
Endpoint = Literal["completions", "chat"]
Positive = Annotated[float, Field(gt=0)]
PositiveOrNone = Annotated[float | None, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
CountOrNone = Annotated[int | None, Field(ge=1)]
NumberOrAuto = float | Literal["auto"] | None


class Slo(BaseModel):
    """The SLOs of a run, all of which a request must meet to count as goodput."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_ms: float = 2000.0
    tpot_ms: float = 100.0
    gap_ms: float | None = None
    """The SLO on the largest gap between two tokens of a request; None if there is none."""

    def in_seconds(self, scale: float = 1.0) -> tuple[float, float, float]:
        """Return the SLOs on TTFT, TPOT and the largest gap, each multiplied by `scale`; inf if there is none."""
        gap_ms = math.inf if self.gap_ms is None else self.gap_ms
        return scale * self.ttft_ms / 1e3, scale * self.tpot_ms / 1e3, scale * gap_ms / 1e3

    @property
    def counted(self) -> str:
        """How many SLOs there are, for sentences such as: it met both SLOs."""
        return "both SLOs" if self.gap_ms is None else "all three SLOs"

    def __str__(self) -> str:
        if self.gap_ms is None:
            return f"TTFT <= {self.ttft_ms:g} ms and TPOT <= {self.tpot_ms:g} ms"
        return f"TTFT <= {self.ttft_ms:g} ms, TPOT <= {self.tpot_ms:g} ms and largest gap <= {self.gap_ms:g} ms"


class ReplayPlan(BaseModel):
    """One replay of one trace against one server."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
    follow: ClassVar[frozenset[str]] = frozenset()
    """Fields whose default follows from other options."""
    fixed: ClassVar[frozenset[str]] = frozenset()
    """Fields that are no options, since they have one value."""

    trace: str = "demo"
    """demo, a file of Azure, BurstGPT, Mooncake, Bailian, ShareGPT, WEKA, AIPerf's DAG or sessions,
    poisson:rate=2,input=512,output=64,n=100 or agentic:sessions=20,rate=0.2,turns=8"""
    time_scale: Positive = 1.0
    """multiply the gaps between arrivals"""
    rate: NumberOrAuto = None
    """rescale time to this mean rate, requests per second; auto: 80 % of what the server can hold, measured before the
    run"""
    limit: CountOrNone = None
    """first N requests only"""
    duration_s: PositiveOrNone = None
    """only the requests in the first N seconds of the trace"""
    length_scale: Positive = 1.0
    """multiply the lengths of prompts and outputs"""
    max_input_tokens: CountOrNone = None
    """longest prompt; --too-long says what happens to longer ones"""
    max_output_tokens: CountOrNone = None
    """longest output; --too-long says what happens to longer ones"""
    too_long: Literal["clip", "drop"] = "clip"
    """cut a request that is too long, or leave it out; the report counts both"""
    jitter_s: NotNegative = 0.0
    """delay each arrival by a random time of up to this many seconds"""
    spread_ticks: bool = False
    """spread arrivals that a trace has at the same tick over the time to the next one"""
    seed: int = 0
    """seed for prompts and jitter"""
    warmup_requests: Annotated[int, Field(ge=0)] = 2
    """requests sent first, one at a time, and not counted"""
    deadline_s: Positive = 120.0
    """a request that takes longer counts as failed"""
    settle_s: NotNegative = 1.0
    """seconds between two readings of /metrics, repeated until two agree"""
    slo: Literal["auto"] | None = None
    """auto: take the SLOs on TTFT and TPOT from the unloaded server, measured before the run, and tell them to the
    server in each request; one on the largest gap is set by --slo-gap-ms alone"""
    slo_ttft_ms: Positive = 2000.0
    """goodput: TTFT at most this many ms; compare tells it to Ridgeline in each request, replay only if an SLO on TTFT
    or TPOT is given"""
    slo_tpot_ms: Positive = 100.0
    """goodput: TPOT at most this many ms; compare tells it to Ridgeline in each request, replay only if an SLO on TTFT
    or TPOT is given"""
    slo_gap_ms: PositiveOrNone = None
    """goodput: largest gap between two tokens of a request at most this many ms; off by default"""
    client_cores: str | None = None
    """run the process that sends the requests on these cores only, such as 0-1,3"""
    endpoint: Endpoint = "completions"
    """completions sends token ids; chat sends the same prompt as text, in one message, cut to make room for the chat
    template"""
    text_prompts: bool = False
    """send completions' prompts as text, for a server that takes no token ids; they are then a few tokens shorter"""
    served_model_name: str | None = None
    """which of the server's models to use; by default the first"""
    tokenizer: str | None = None
    """directory or hub name of the model's tokenizer; by default the server's"""

    @property
    def slos(self) -> Slo:
        """The SLOs as one value; with `slo` auto they are right only once they were measured."""
        return Slo(ttft_ms=self.slo_ttft_ms, tpot_ms=self.slo_tpot_ms, gap_ms=self.slo_gap_ms)

    @property
    def named_slos(self) -> list[str]:
        """Which of the SLOs on TTFT and TPOT were given or measured, so that a server can be told them."""
        return sorted({"slo_ttft_ms", "slo_tpot_ms"} & self.model_fields_set)

    @property
    def sends_text(self) -> bool:
        """Whether prompts travel as text; a chat's always do."""
        return self.text_prompts or self.endpoint == "chat"

    @property
    def measures_first(self) -> bool:
        """Whether a server must be measured before this plan says what is sent, see `loadtest.run.calibration`."""
        return AUTO in (self.rate, self.slo)

    @field_validator("rate", mode="before")
    @classmethod
    def _number_or_auto(cls, value: object) -> object:
        if value is None or value == AUTO:
            return value
        if (number := _positive(value)) is None:
            raise ValueError(f"must be a number above 0 or auto, not {value!r}")
        return number

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for problem in self._contradictions():
            raise ValueError(problem)
        return self

    def _contradictions(self) -> Iterator[str]:
        if self.rate is not None and "time_scale" in self.model_fields_set:
            yield "rate and time_scale both rescale time: give one of them"
        given = self.named_slos
        if self.slo == AUTO and given:
            yield f"slo auto measures TTFT and TPOT: leave out {' and '.join(given)}, or slo"


class ComparePlan(ReplayPlan):
    """A plan that replays the same requests against several variants, in pairs of rounds at one rate or more."""

    follow: ClassVar[frozenset[str]] = frozenset({"variants", "pairs"})
    fixed: ClassVar[frozenset[str]] = frozenset({"warmup_requests", "time_scale", "duration_s", "rates"})

    warmup_requests: Literal[0] = 0
    """of a round; each worker is warmed up when it has started, see `loadtest.run.warm_up`"""
    time_scale: Literal[1] = 1
    """each round has a rate instead"""
    duration_s: None = None
    """each round has its seconds instead"""
    rates: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """the numbers that `rate` has; none for a search"""
    variants: str | None = None
    """modes of an own deployment to compare, separated by commas; by default colocated,disaggregated,adaptive, and none
    beside --server. One twice is an A/A run"""
    server: list[str] | None = None
    """NAME=URL, a running OpenAI-compatible server to compare; NAME=URL,URL: several that get the requests in turn. May
    be repeated"""
    devices: list[str] | None = None
    """NAME=N, the GPUs, or cores, that a running server has; the report then has figures per device. May be repeated"""
    engines: list[str] | None = None
    """NAME=URL,URL, engines behind a running server, such as those of a proxy, whose /metrics and settings are read
    too. May be repeated"""
    allow_unequal: bool = False
    """compare although the variants differ in devices, dtype, graphs, caches or the like; the report shows it in red"""
    pairs: CountOrNone = None
    """most pairs of rounds; by default 8 at each given rate, and 36 in a search, which ends when all is known"""
    round_s: Positive = 60.0
    """seconds of arrivals in a round, at the first rate; --limit sets the requests instead"""
    price_per_hour: PositiveOrNone = None
    """price of one core, or one GPU, per hour; the report then has the cost of a million tokens"""
    budget_s: PositiveOrNone = None
    """seconds that the whole comparison may take, starts included; pairs and requests in a round follow from it"""
    attainment: Share = 0.9
    """the share of requests that must meet the SLOs at a rate for a variant to hold it"""

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes of an own deployment that are compared; running servers come after them."""
        default = "" if self.server else ",".join(MODES)
        return tuple(cast(Mode, mode) for mode in (self.variants or default).split(",") if mode)

    @property
    def servers(self) -> dict[str, tuple[str, ...]]:
        """The base URLs of each running server, by its name."""
        return _urls_by_name(self.server)

    @property
    def devices_of(self) -> dict[str, int]:
        """The devices of running servers, by their names."""
        return {name.strip(): int(count) for name, count in (each.split("=") for each in self.devices or ())}

    @property
    def engines_of(self) -> dict[str, tuple[str, ...]]:
        """The base URLs of the engines behind running servers, by the servers' names."""
        return _urls_by_name(self.engines)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The variants: a mode each, and then the names of running servers."""
        return (*self.modes, *self.servers)

    @property
    def measures_first(self) -> bool:
        """Whether a server must be measured first: for rate, SLOs, or what fits the budget."""
        return super().measures_first or self.budget_s is not None or not self.rates

    @property
    def most_pairs(self) -> int:
        """The most pairs of rounds."""
        return self.pairs or (PAIRS_AT_A_RATE * len(self.rates) if self.rates else MOST_PAIRS_OF_A_SEARCH)

    def with_rate(self) -> Self:
        """Return the plan with a first rate to be measured, unless it has one."""
        return self.model_copy(update={"rate": self.rate or AUTO})

    @model_validator(mode="before")
    @classmethod
    def _several_rates(cls, fields: Any) -> Any:
        """Take a list of rates apart; the first is the one that rounds are planned for."""
        if not isinstance(fields, Mapping) or fields.get("rate") in (None, AUTO) or fields.get("rates"):
            return fields
        rates = [_positive(text) for text in str(fields["rate"]).split(",")]
        # A list with a wrong one stays as it is, so that `rate` is refused and named.
        return fields if None in rates else {**fields, "rate": rates[0], "rates": rates}

    @field_validator("variants")
    @classmethod
    def _known_modes(cls, value: str | None) -> str | None:
        if value is None:
            return None
        modes = [mode.strip() for mode in value.split(",")]
        if not set(modes) <= {*MODES}:
            raise ValueError(f"must be some of {', '.join(MODES)}, separated by commas, not {value!r}")
        return ",".join(modes)

    @field_validator("server", "engines")
    @classmethod
    def _named_urls(cls, value: list[str] | None) -> list[str] | None:
        for each in value or ():
            name, _, urls = each.partition("=")
            if not name.strip() or name.strip() in MODES or not urls:
                raise ValueError(f"must be NAME=URL, with a name that no mode has, not {each!r}")
            for url in urls.split(","):
                if not re.fullmatch(r"https?://[^/\s@]+(/.*)?", url.strip()) or not _has_port_or_none(url.strip()):
                    raise ValueError(f"must have URLs such as vllm=http://127.0.0.1:8001, not {url!r}")
        return _named_once(value, "join its URLs with commas, or give another server another name")

    @field_validator("devices")
    @classmethod
    def _named_counts(cls, value: list[str] | None) -> list[str] | None:
        for each in value or ():
            if not re.fullmatch(r"[^=]+=[1-9]\d*", each):
                raise ValueError(f"must be NAME=N, such as vllm=2, not {each!r}")
        return _named_once(value, "leave one out")

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if not 2 <= len(self.kinds) <= MOST_VARIANTS:
            yield (
                f"a comparison has two to {MOST_VARIANTS} variants, not {len(self.kinds)}: name modes "
                f"(--variants {COLOCATED},{DISAGGREGATED}), running servers (--server NAME=URL, twice), or both"
            )
        for option, named in (("devices", self.devices_of), ("engines", self.engines_of)):
            if unknown := sorted(set(named) - self.servers.keys()):
                called = ", ".join(self.servers) or "none"
                yield f"--{option} name {', '.join(unknown)}, which no server is called; servers: {called}"


def _urls_by_name(given: list[str] | None) -> dict[str, tuple[str, ...]]:
    found = (each.partition("=")[::2] for each in given or ())
    return {
        name.strip(): tuple(url.strip().rstrip("/").removesuffix("/v1") for url in urls.split(",") if url.strip())
        for name, urls in found
    }


def _named_once(given: list[str] | None, fix: str) -> list[str] | None:
    names = [each.partition("=")[0].strip() for each in given or ()]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"must name a server once, and {repeated} is given twice: {fix}")
    return given


def _positive(value: object) -> float | None:
    """Return the number above 0 that this is, or None."""
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


def _has_port_or_none(url: str) -> bool:
    try:
        _ = urlsplit(url).port
    except ValueError:
        return False
    return True
