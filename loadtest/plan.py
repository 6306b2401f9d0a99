"""The settings of a run, checked before anything starts.

Each field is an option of the commands, and its description is the help text (`cluster.commands.plan_options`).
"""

import math
import re
from typing import Final, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Mode = Literal["colocated", "disaggregated", "adaptive"]
COLOCATED: Mode = "colocated"
DISAGGREGATED: Mode = "disaggregated"
ADAPTIVE: Mode = "adaptive"
MODES: tuple[Mode, ...] = get_args(Mode)
OPPONENT: Final = "opponent"
"""The kind of an arm that somebody else runs."""
SECONDS_OF_A_ROUND = 60.0
MOST_PAIRS = 16
LEAST_PAIRS = 6
"""The fewest pairs that a conclusion takes; `loadtest.statistics.looks` says why."""
LEAST_PAIRS_OF_A_SEARCH, MOST_PAIRS_OF_A_SEARCH = 18, 36
"""Three pairs at each of six rates, or of twelve."""
AUTO: Final = "auto"
NumberOrAuto = float | Literal["auto"] | None


class Slo(BaseModel):
    """The limits that a request must meet to count as goodput."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_ms: float = 2000.0
    tpot_ms: float = 100.0
    gap_ms: float | None = None
    """The limit on the largest gap between two tokens of a request; None if there is none."""

    def in_seconds(self, scale: float = 1.0) -> tuple[float, float, float]:
        """Return the limits on TTFT, TPOT and the largest gap, each multiplied by `scale`; inf if there is none."""
        gap_ms = math.inf if self.gap_ms is None else self.gap_ms
        return scale * self.ttft_ms / 1e3, scale * self.tpot_ms / 1e3, scale * gap_ms / 1e3

    @property
    def counted(self) -> str:
        """How many limits there are, for sentences such as: it met both limits."""
        return "both limits" if self.gap_ms is None else "all three limits"

    def __str__(self) -> str:
        if self.gap_ms is None:
            return f"TTFT <= {self.ttft_ms:g} ms and TPOT <= {self.tpot_ms:g} ms"
        return f"TTFT <= {self.ttft_ms:g} ms, TPOT <= {self.tpot_ms:g} ms and largest gap <= {self.gap_ms:g} ms"


class ReplayPlan(BaseModel):
    """One replay of one trace against one server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trace: str = Field(
        "demo",
        description="demo, an Azure or BurstGPT CSV, a Mooncake JSONL, sessions, a ShareGPT JSON, "
        "or poisson:rate=2,input=512,output=64,n=100",
    )
    time_scale: float = Field(1.0, description="multiply the gaps between arrivals")
    rate: NumberOrAuto = Field(
        None,
        description="rescale time to this mean rate, requests per second; "
        "auto: 80 % of what the server can hold, measured before the run",
    )
    limit: int | None = Field(None, description="first N requests only")
    duration_s: float | None = Field(None, description="only the requests in the first N seconds of the trace")
    length_scale: float = Field(1.0, description="multiply the lengths of prompts and outputs")
    max_input_tokens: int | None = Field(
        None, description="longest prompt; --too-long says what happens to longer ones"
    )
    max_output_tokens: int | None = Field(
        None, description="longest output; --too-long says what happens to longer ones"
    )
    too_long: Literal["clip", "drop"] = Field(
        "clip", description="cut a request that is too long, or leave it out; the report counts both"
    )
    jitter_s: float = Field(0.0, description="delay each arrival by a random time of up to this many seconds")
    spread_ticks: bool = Field(
        False, description="spread arrivals that a trace has at the same tick over the time to the next one"
    )
    seed: int = Field(0, description="seed for prompts and jitter")
    warmup_requests: int = Field(2, description="requests sent first, one at a time, and not counted")
    deadline_s: float = Field(120.0, description="a request that takes longer counts as failed")
    settle_s: float = Field(1.0, description="seconds between two readings of /metrics, repeated until two agree")
    slo: Literal["auto"] | None = Field(
        None,
        description="auto: take the limits of TTFT and TPOT from the unloaded server, measured before the run; "
        "one on the largest gap is set by --slo-gap-ms alone",
    )
    slo_ttft_ms: float = Field(2000.0, description="goodput: TTFT at most this many ms")
    slo_tpot_ms: float = Field(100.0, description="goodput: TPOT at most this many ms")
    slo_gap_ms: float | None = Field(
        None, description="goodput: largest gap between two tokens of a request at most this many ms; off by default"
    )
    client_cores: str | None = Field(
        None, description="run the process that sends the requests on these cores only, such as 0-1,3"
    )
    endpoint: Literal["completions", "chat"] = Field(
        "completions", description="completions sends token ids; chat sends the same prompt as text, in one message"
    )
    text_prompts: bool = Field(
        False, description="send completions' prompts as text, for a server that takes no token ids; lengths then vary"
    )
    served_name: str | None = Field(None, description="which of the server's models to use; by default the first")
    tokenizer: str | None = Field(
        None, description="directory or hub name of the model's tokenizer; by default the server's"
    )

    @property
    def limits(self) -> Slo:
        """The limits as one value; with `slo` auto they are right only once it is settled."""
        return Slo(ttft_ms=self.slo_ttft_ms, tpot_ms=self.slo_tpot_ms, gap_ms=self.slo_gap_ms)

    @property
    def sends_text(self) -> bool:
        """Whether prompts travel as text; a chat's always do."""
        return self.text_prompts or self.endpoint == "chat"

    @property
    def measures_first(self) -> bool:
        """Whether a server must be measured before this plan says what is sent (`loadtest.run.calibration`)."""
        return AUTO in (self.rate, self.slo)

    @field_validator("rate", mode="before")
    @classmethod
    def _number_or_auto(cls, value: object) -> object:
        try:
            return float(value) if isinstance(value, str) and value != AUTO else value
        except ValueError:
            raise ValueError(f"must be a number above 0 or auto, not {value!r}") from None

    @field_validator(
        "time_scale", "rate", "duration_s", "length_scale", "deadline_s", "slo_ttft_ms", "slo_tpot_ms", "slo_gap_ms"
    )
    @classmethod
    def _above_zero(cls, value: float | str | None) -> float | str | None:
        if isinstance(value, float) and not 0 < value < float("inf"):
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
        if not 0 <= value < float("inf"):
            raise ValueError(f"must be a number, 0 or more, not {value:g}")
        return value

    @model_validator(mode="after")
    def _one_time_control(self) -> "ReplayPlan":
        if self.rate is not None and self.time_scale != 1:
            raise ValueError("rate and time_scale both rescale time: give one of them")
        return self

    @model_validator(mode="after")
    def _one_source_of_limits(self) -> "ReplayPlan":
        given = sorted({"slo_ttft_ms", "slo_tpot_ms"} & self.model_fields_set)
        if self.slo == AUTO and given:
            raise ValueError(f"slo auto measures TTFT and TPOT: leave out {' and '.join(given)}, or slo")
        return self


class ComparePlan(ReplayPlan):
    """A plan that replays the same requests against two arms, in pairs of rounds."""

    arms: str = Field(
        f"{COLOCATED},{DISAGGREGATED}",
        description="the two modes to compare, of colocated, disaggregated and adaptive, separated by a comma; the "
        "same one twice is an A/A run; with --opponent, a single mode, or with --find-rate one or two",
    )
    pairs: int = Field(
        MOST_PAIRS, description="most pairs of rounds; the result is looked at after 6, 9, 12, 16 and the last"
    )
    round_s: float = Field(
        SECONDS_OF_A_ROUND,
        description="seconds of arrivals in a round, at the mean rate; --limit sets the requests instead",
    )
    opponent: str | None = Field(
        None,
        description="URL of a running OpenAI-compatible server of the same model, which becomes the arm after "
        "those of --arms; several, separated by commas, get the requests in turn",
    )
    opponent_name: str = Field("opponent", description="what tables and sentences call the opponent")
    opponent_devices: int | None = Field(
        None, description="cores, or GPUs, that the opponent runs on; the report then has its figures per device"
    )
    opponent_served_name: str | None = Field(
        None, description="which of the opponent's models to use; by default the first"
    )
    opponent_tokenizer: str | None = Field(
        None, description="directory or hub name of the opponent's tokenizer; by default that of the mode's model"
    )
    opponent_endpoint: Literal["completions", "chat"] | None = Field(
        None, description="the opponent's endpoint; by default that of --endpoint"
    )
    opponent_text_prompts: bool = Field(False, description="send the opponent's prompts as text")
    opponent_processes: str | None = Field(
        None,
        description="ids of processes on this machine that also serve the opponent, such as the servers behind its "
        "proxy, separated by commas; processes that listen at its URL are found automatically",
    )
    margin: float = Field(0.05, description="arms are equivalent if their shares differ by less than this")
    price_per_hour: float | None = Field(
        None, description="price of one core, or one GPU, per hour; the report then has the cost of a million tokens"
    )
    budget_s: float | None = Field(
        None,
        description="seconds that the whole comparison may take, starts included; "
        "the number of pairs and of requests in a round follow from it and from the rate",
    )

    find_rate: bool = Field(
        False,
        description="find the highest rate at which enough requests meet the limits, in every arm; "
        "--rate is then the first rate",
    )
    grid: str | None = Field(
        None,
        description="YAML file with candidates of each mode, named sets of settings; the best of each mode, found in "
        "rounds of their own, is compared",
    )
    tuning_rounds: int = Field(3, description="with --grid: rounds of each candidate, before the pairs")
    attainment: float = Field(
        0.9, description="with --find-rate: the share of requests that must meet the limits at a rate"
    )

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes of Ridgeline's own arms, one or two; an opponent comes after them."""
        return tuple(cast(Mode, mode) for mode in self.arms.split(","))

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the arms are: a mode each, and the opponent last."""
        return self.modes if self.opponent is None else (*self.modes, OPPONENT)

    @property
    def opponent_urls(self) -> tuple[str, ...]:
        """The opponent's base URLs; none without an opponent."""
        return tuple(
            url.strip().rstrip("/").removesuffix("/v1") for url in (self.opponent or "").split(",") if url.strip()
        )

    @property
    def opponent_process_ids(self) -> tuple[int, ...]:
        """The processes that the user has named as serving the opponent."""
        return tuple(int(pid) for pid in (self.opponent_processes or "").split(",") if pid.strip())

    @property
    def measures_first(self) -> bool:
        """Whether a server must be measured first: for rate, limits, or what fits the budget."""
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

    def of_warm_round(self) -> "ComparePlan":
        """Return the plan of a round, whose server is warm already."""
        return self.model_copy(update={"warmup_requests": 0})

    def of_search(self) -> "ComparePlan":
        """Return the plan of a search for the highest rate, whose first rate is measured unless it is given."""
        return self.model_copy(update={"pairs": MOST_PAIRS_OF_A_SEARCH, "rate": self.rate or AUTO})

    @field_validator("arms")
    @classmethod
    def _known_modes(cls, value: str) -> str:
        modes = [mode.strip() for mode in value.split(",")]
        if len(modes) > 2 or not set(modes) <= {*MODES}:
            raise ValueError(f"must be two of {', '.join(MODES)}, separated by a comma, not {value!r}")
        return ",".join(modes)

    @field_validator("opponent")
    @classmethod
    def _urls(cls, value: str | None) -> str | None:
        for url in (value or "").split(",") if value is not None else ():
            if not re.fullmatch(r"https?://[^/\s@]+(/.*)?", url.strip()):
                raise ValueError(f"must be URLs such as http://127.0.0.1:8001, separated by commas, not {url!r}")
        return value

    @field_validator("opponent_processes")
    @classmethod
    def _process_ids(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"\d+(\s*,\s*\d+)*", value.strip()):
            raise ValueError(f"must be process ids such as 4711,4712, not {value!r}")
        return value

    @field_validator("opponent_devices")
    @classmethod
    def _some_devices(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError(f"must be 1 or more, not {value}")
        return value

    @field_validator("opponent_name")
    @classmethod
    def _own_name(cls, value: str) -> str:
        if not value.strip() or value in MODES:
            raise ValueError(f"must be a name that no mode has, not {value!r}")
        return value

    @model_validator(mode="after")
    def _enough_arms(self) -> "ComparePlan":
        if self.opponent is not None and len(self.modes) != 1 and not self.find_rate:
            raise ValueError(
                f"an opponent is arm b: name the one mode to compare with it, such as arms {DISAGGREGATED}; only a "
                "search (find_rate) takes both modes and an opponent"
            )
        if self.opponent is None and len(self.modes) != 2:
            raise ValueError(
                f"arms must be two of {', '.join(MODES)}, separated by a comma, not {self.arms!r}; "
                "one is for a comparison with an opponent"
            )
        given = sorted(name for name in self.model_fields_set if name.startswith("opponent_"))
        if self.opponent is None and any(
            getattr(self, name) != type(self).model_fields[name].default for name in given
        ):
            raise ValueError(f"{' and '.join(given)} say nothing without an opponent: give its URL")
        return self

    @field_validator("budget_s", "round_s", "price_per_hour")
    @classmethod
    def _some_time(cls, value: float | None) -> float | None:
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"must be a number above 0, not {value:g}")
        return value

    @model_validator(mode="after")
    def _one_question(self) -> "ComparePlan":
        def chosen(*names: str) -> list[str]:
            return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]

        if not self.find_rate and chosen("attainment"):
            raise ValueError("attainment is the share that find_rate looks for: give find_rate too, or leave it out")
        if self.find_rate and (unused := chosen("duration_s", "margin", "pairs", "time_scale")):
            raise ValueError(f"find_rate chooses rates and pairs by itself: leave out {' and '.join(unused)}")
        return self

    @model_validator(mode="after")
    def _tuning_fits(self) -> "ComparePlan":
        if self.grid is None:
            if self.tuning_rounds != type(self).model_fields["tuning_rounds"].default:
                raise ValueError("tuning_rounds are of the candidates in a grid: give grid too, or leave them out")
            return self
        reasons = {
            "find_rate": (self.find_rate, "a search looks for a rate, and candidates are tried at one rate"),
            "opponent": (self.opponent is not None, "an opponent is not ours to tune"),
            "budget_s": (self.budget_s is not None, "a budget is divided among pairs, and not among candidates"),
        }
        for name, (is_given, reason) in reasons.items():
            if is_given:
                raise ValueError(f"grid does not go with {name}, since {reason}: leave one of them out")
        if len(set(self.modes)) == 1:
            raise ValueError(
                f"grid needs two modes, and arms are {self.arms}: the same candidate would be chosen twice"
            )
        return self

    @field_validator("margin", "attainment")
    @classmethod
    def _a_share(cls, value: float) -> float:
        if not 0 < value < 1:
            raise ValueError(f"must be a share between 0 and 1, not {value:g}")
        return value

    @field_validator("pairs", "tuning_rounds")
    @classmethod
    def _at_least_one_pair(cls, value: int) -> int:
        if value < 1:
            raise ValueError(f"must be 1 or more, not {value}")
        return value
