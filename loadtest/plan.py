"""The settings of a run, checked before anything starts.

Each field is an option of the commands, and its docstring is the help text (`ridgeline.cluster.commands.plan_options`).
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
BASELINE: Final = "baseline"
"""The kind of a variant that somebody else runs."""
LEAST_PAIRS = 6
"""The fewest pairs that a conclusion takes; `ridgeline.loadtest.statistics.looks` says why."""
LEAST_PAIRS_OF_A_SEARCH, MOST_PAIRS_OF_A_SEARCH = 4, 36
"""Two that bracket the rates and two within; a search ends before the most if all is known."""
OF_ONE_RATE: Final = frozenset({"rate", "time_scale", "pairs", "margin", "duration_s", "grid", "tuning_rounds"})
"""Options that ask for pairs of rounds at a single rate."""
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
    renamed: ClassVar[Mapping[str, str]] = {}
    """The former name of each renamed field, with its name now."""
    follow: ClassVar[frozenset[str]] = frozenset()
    """Fields whose default follows from other options, see `completed`."""
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
    served_name: str | None = None
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

    @classmethod
    def completed(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options with those that follow from which were given."""
        return dict(given)

    @classmethod
    def current_names(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields, each by its name now."""
        return {cls.renamed.get(name, name): value for name, value in fields.items()}

    @model_validator(mode="before")
    @classmethod
    def _with_current_names(cls, fields: Any) -> Any:
        return cls.current_names(fields) if isinstance(fields, Mapping) else fields

    @field_validator("rate", mode="before")
    @classmethod
    def _number_or_auto(cls, value: object) -> object:
        if value is None or value == AUTO:
            return value
        try:
            number = float(str(value))
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            raise ValueError(f"must be a number above 0 or auto, not {value!r}")
        return number

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for problem in self._contradictions():
            raise ValueError(problem)
        return self

    def _contradictions(self) -> Iterator[str]:
        if self.rate is not None and self._chosen("time_scale"):
            yield "rate and time_scale both rescale time: give one of them"
        given = self.named_slos
        if self.slo == AUTO and given:
            yield f"slo auto measures TTFT and TPOT: leave out {' and '.join(given)}, or slo"

    def _chosen(self, *names: str) -> list[str]:
        """Return those of these fields that were given, also with their default; what is off says nothing."""
        given = self.model_fields_set
        return [name for name in names if name in given and getattr(self, name) not in (None, False)]


class ComparePlan(ReplayPlan):
    """A plan that replays the same requests against two variants, in pairs of rounds."""

    renamed: ClassVar[Mapping[str, str]] = {
        "arms": "variants",
        "opponent": "baseline",
        "opponent_name": "baseline_name",
        "opponent_devices": "baseline_devices",
        "opponent_served_name": "baseline_served_name",
        "opponent_tokenizer": "baseline_tokenizer",
        "opponent_endpoint": "baseline_endpoint",
        "opponent_text_prompts": "baseline_text_prompts",
        "opponent_processes": "baseline_processes",
    }
    follow: ClassVar[frozenset[str]] = frozenset({"variants", "find_rate"})
    fixed: ClassVar[frozenset[str]] = frozenset({"warmup_requests"})

    warmup_requests: Literal[0] = 0
    """of a round; each worker is warmed up when it has started, see `loadtest.run.warm_up`"""
    variants: str = f"{COLOCATED},{DISAGGREGATED}"
    """modes to compare, separated by commas; by default colocated,disaggregated,adaptive over rates, the first two of
    them at one rate. One twice is an A/A run. Beside a --baseline, at one rate, give one"""
    pairs: Count = 16
    """most pairs of rounds; the result is looked at after 6, 9, 12, 16 and the last"""
    round_s: Positive = 60.0
    """seconds of arrivals in a round, at the mean rate; --limit sets the requests instead"""
    baseline: str | None = None
    """URL of a running OpenAI-compatible server of the same model, which becomes the variant after those of --variants;
    several, separated by commas, get the requests in turn"""
    baseline_name: str = BASELINE
    """what tables and sentences call the baseline"""
    baseline_devices: CountOrNone = None
    """cores, or GPUs, that the baseline runs on; the report then has its figures per device"""
    baseline_served_name: str | None = None
    """which of the baseline's models to use; by default the first"""
    baseline_tokenizer: str | None = None
    """directory or hub name of the baseline's tokenizer; by default that of the mode's model"""
    baseline_endpoint: Endpoint | None = None
    """the baseline's endpoint; by default that of --endpoint"""
    baseline_text_prompts: bool = False
    """send the baseline's prompts as text"""
    baseline_processes: str | None = None
    """ids of processes on this machine that also serve the baseline, such as the servers behind its proxy, separated by
    commas; processes that listen at its URL are found automatically"""
    margin: Share = 0.05
    """variants are equivalent if their SLO attainment differs by less than this"""
    price_per_hour: PositiveOrNone = None
    """price of one core, or one GPU, per hour; the report then has the cost of a million tokens"""
    budget_s: PositiveOrNone = None
    """seconds that the whole comparison may take, starts included; the number of pairs and of requests in a round
    follow from it and from the rate"""
    find_rate: bool = False
    """find the highest rate at which enough requests meet the SLOs, in every variant; the default unless an option asks
    for one rate (--rate, --time-scale, --pairs, --margin, --duration-s, --grid), and --rate is then the first one"""
    grid: str | None = None
    """YAML file with candidates of each mode, named sets of settings; the best of each mode, found in rounds of their
    own, is compared"""
    tuning_rounds: Count = 3
    """with --grid: rounds of each candidate, before the pairs"""
    attainment: Share = 0.9
    """with --find-rate: the share of requests that must meet the SLOs at a rate"""

    @classmethod
    def completed(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options; without one that asks for a single rate, all modes are measured over rates."""
        given = cls.current_names(given)
        if "find_rate" not in given and not given.keys() & OF_ONE_RATE:
            given["find_rate"] = True
        if given.get("find_rate") and "variants" not in given:
            given["variants"] = ",".join(MODES)
        return given

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes of Ridgeline's own variants; a baseline comes after them."""
        return tuple(cast(Mode, mode) for mode in self.variants.split(","))

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the variants are: a mode each, and the baseline last."""
        return self.modes if self.baseline is None else (*self.modes, BASELINE)

    @property
    def baseline_urls(self) -> tuple[str, ...]:
        """The baseline's base URLs; none without a baseline."""
        return tuple(
            url.strip().rstrip("/").removesuffix("/v1") for url in (self.baseline or "").split(",") if url.strip()
        )

    @property
    def baseline_process_ids(self) -> tuple[int, ...]:
        """The processes that the user has named as serving the baseline."""
        return tuple(int(pid) for pid in (self.baseline_processes or "").split(",") if pid.strip())

    @property
    def measures_first(self) -> bool:
        """Whether a server must be measured first: for rate, SLOs, or what fits the budget."""
        return super().measures_first or self.budget_s is not None

    @property
    def wanted_pairs(self) -> int:
        """The pairs that must fit into the budget for it to end with a result."""
        return LEAST_PAIRS_OF_A_SEARCH if self.find_rate else LEAST_PAIRS

    @property
    def planned_pairs(self) -> int:
        """The pairs for which a budget is divided: one more than a result takes, since one may show no difference.

        Of six pairs the exact test needs all to agree; of seven, six.
        """
        return self.wanted_pairs if self.find_rate else self.wanted_pairs + 1

    def of_search(self) -> Self:
        """Return the plan of a search for the maximum goodput rate, whose first rate is measured unless given."""
        return self.model_copy(update={"pairs": MOST_PAIRS_OF_A_SEARCH, "rate": self.rate or AUTO})

    @field_validator("variants")
    @classmethod
    def _known_modes(cls, value: str) -> str:
        modes = [mode.strip() for mode in value.split(",")]
        if len(modes) > len(MODES) or not set(modes) <= {*MODES}:
            raise ValueError(f"must be two of {', '.join(MODES)}, separated by a comma, or all three, not {value!r}")
        return ",".join(modes)

    @field_validator("baseline")
    @classmethod
    def _urls(cls, value: str | None) -> str | None:
        for url in (value or "").split(",") if value is not None else ():
            if not re.fullmatch(r"https?://[^/\s@]+(/.*)?", url.strip()) or not _has_port_or_none(url.strip()):
                raise ValueError(f"must be URLs such as http://127.0.0.1:8001, separated by commas, not {url!r}")
        return value

    @field_validator("baseline_processes")
    @classmethod
    def _process_ids(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"\d+(\s*,\s*\d+)*", value.strip()):
            raise ValueError(f"must be process ids such as 4711,4712, not {value!r}")
        return value

    @field_validator("baseline_name")
    @classmethod
    def _own_name(cls, value: str) -> str:
        if not value.strip() or value in MODES:
            raise ValueError(f"must be a name that no mode has, not {value!r}")
        return value

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        yield from self._wrong_variants()
        if not self.find_rate and self._chosen("attainment"):
            yield "attainment is the share that find_rate looks for: give find_rate too, or leave it out"
        if self.find_rate and (unused := self._chosen("duration_s", "margin", "pairs", "time_scale")):
            yield f"find_rate chooses rates and pairs by itself: leave out {' and '.join(unused)}"
        if self.grid is not None:
            yield from self._wrong_beside_grid()
        elif self._chosen("tuning_rounds"):
            yield "tuning_rounds are of the candidates in a grid: give grid too, or leave them out"

    def _wrong_variants(self) -> Iterator[str]:
        if self.baseline is not None and len(self.modes) != 1 and not self.find_rate:
            yield (
                f"a baseline is variant b: name the one mode to compare with it, such as variants {DISAGGREGATED}; "
                "only a search (find_rate) takes several modes and a baseline"
            )
        if self.baseline is None and (len(self.modes) < 2 or (len(self.modes) > 2 and not self.find_rate)):
            yield (
                f"variants must be two of {', '.join(MODES)}, separated by a comma, not {self.variants!r}; one is for "
                "a comparison with a baseline, and three are for one over rates: leave --rate out"
            )
        if self.baseline is None and (
            unused := self._chosen(*(name for name in type(self).model_fields if name.startswith("baseline_")))
        ):
            yield f"{' and '.join(unused)} say nothing without a baseline: give its URL"

    def _wrong_beside_grid(self) -> Iterator[str]:
        reasons = {
            "find_rate": "a search looks for a rate, and candidates are tried at one rate",
            "baseline": "a baseline is not ours to tune",
            "budget_s": "a budget is divided among pairs, and not among candidates",
        }
        for name in self._chosen(*reasons):
            yield f"grid does not go with {name}, since {reasons[name]}: leave one of them out"
        if len(set(self.modes)) == 1:
            yield f"grid needs two modes, and variants are {self.variants}: the same candidate would be chosen twice"


def _has_port_or_none(url: str) -> bool:
    try:
        _ = urlsplit(url).port
    except ValueError:
        return False
    return True
