"""What a run was asked for, as run.json keeps it for `--resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

from loadtest.errors import LoadTestError
from loadtest.plan import COLOCATED, DISAGGREGATED
from loadtest.run_folder import RUN

ADAPTIVE: Final = "adaptive"
ARMS: Final = (COLOCATED, DISAGGREGATED, ADAPTIVE)
WORKLOADS: Final = ("poisson", "conversation", "code")
FROM_FILES: Final = {"conversation": "AzureLLMInferenceTrace_conv.csv", "code": "AzureLLMInferenceTrace_code.csv"}
"""Workloads that are slices of a trace, and what Azure/AzurePublicDataset calls its file."""
TTFT_FACTORS: Final = (2.0, 3.5, 5.0, 12.0)
TPOT_FACTORS: Final = (1.3, 2.0, 3.0, 4.0)
"""Limits as multiples of the unloaded TTFT of the median prompt, and of the unloaded decode step."""
NAMED: Final = {(2.0, 1.3): "tight", (5.0, 2.0): "balanced", (12.0, 4.0): "loose"}
Part = Literal["map", "shift"]
Scale = tuple[float, float]
"""The factors of prompt and answer lengths."""
SCALES: Final[dict[str, Scale]] = {"conversation": (0.25, 0.25), "code": (0.25, 0.5)}


class Settings(msgspec.Struct, frozen=True):
    """The options of a run; times in seconds, rates in requests/s."""

    part: Part = "map"
    arms: tuple[str, ...] = ARMS
    workloads: tuple[str, ...] = WORKLOADS
    traces: dict[str, str] = {}
    """The file of each workload that is a slice of one."""
    scales: dict[str, Scale] = msgspec.field(default_factory=lambda: dict(SCALES))
    rows: int = 600
    """Requests of a slice; rounds take windows of it in turn."""
    ttft_factors: tuple[float, ...] = TTFT_FACTORS
    tpot_factors: tuple[float, ...] = TPOT_FACTORS
    rate_factors: tuple[float, ...] = (0.7, 1.0, 1.2, 1.45, 2.0)
    """Rates as multiples of the knee of the better pure mode."""
    knees: dict[str, float] = {}
    """Knees that are given, by workload; the others are searched for."""
    requests: int | None = None
    """Requests of a round; None: as many as the budget has room for."""
    most_blocks: int = 4
    """Rounds at most of each pure mode at each rate."""
    budget_s: float = 5100.0
    phase_s: float = 60.0
    """Of the second part: seconds of each of the three phases."""
    share: float = 0.8
    """Of the second part: the load of a phase, as a share of what both workers together are calculated to hold."""
    seed: int = 0
    config: str = "deploy/local.yaml"
    overrides: dict[str, str] = {}
    url: str | None = None
    """A running deployment to use; None: one is started."""

    def check(self) -> None:
        """Raise LoadTestError, which names the option, for what no round could be run with."""
        if unknown := [arm for arm in self.arms if arm not in ARMS]:
            raise LoadTestError(f"--arms: {', '.join(unknown)} is no mode; the modes are {', '.join(ARMS)}")
        if not self.pure_arms:
            raise LoadTestError(f"--arms needs {COLOCATED} or {DISAGGREGATED}, which adaptive is compared with")
        if unknown := [name for name in self.workloads if name not in WORKLOADS]:
            raise LoadTestError(f"--workloads: {', '.join(unknown)} is none of {', '.join(WORKLOADS)}")
        for name in self.workloads if self.part == "map" else ():
            self._check_trace(name)
        numbers = (*self.ttft_factors, *self.tpot_factors, *self.rate_factors, self.budget_s, self.phase_s, self.share)
        if not all(0 < number < float("inf") for number in (*numbers, *self.knees.values())):
            raise LoadTestError("factors, rates, shares and seconds must be numbers above 0")

    def _check_trace(self, name: str) -> None:
        if name not in FROM_FILES:
            return
        option, path = f"--{name}-trace", self.traces.get(name)
        why = "was not given" if path is None else f"is {path}, which is no file"
        if path is None or not Path(path).is_file():
            raise LoadTestError(
                f"the workload {name} is a slice of {FROM_FILES[name]} of github.com/Azure/AzurePublicDataset, and "
                f"{option} {why}: give {option} FILE, or leave the workload out with --workloads"
            )

    @property
    def pure_arms(self) -> tuple[str, ...]:
        """The modes that know no limits, so that one round of theirs serves all cells."""
        return tuple(arm for arm in self.arms if arm != ADAPTIVE)

    @property
    def cells(self) -> tuple[tuple[int, int], ...]:
        """Places of the TTFT and of the TPOT factor, of every cell of a map."""
        return tuple((row, column) for row in range(len(self.ttft_factors)) for column in range(len(self.tpot_factors)))

    def named(self, cell: tuple[int, int]) -> str | None:
        """Return what the limits of this cell are called; None if they have no name."""
        return NAMED.get((self.ttft_factors[cell[0]], self.tpot_factors[cell[1]]))

    @property
    def balanced(self) -> tuple[int, int]:
        """The cell at whose limits the knee is looked for: the balanced one, or else the middle of the map."""
        named = (cell for cell in self.cells if self.named(cell) == "balanced")
        return next(named, (len(self.ttft_factors) // 2, len(self.tpot_factors) // 2))


def save(settings: Settings, folder: Path) -> None:
    """Write run.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN).write_bytes(msgspec.json.format(msgspec.json.encode(settings), indent=2) + b"\n")


def saved(folder: Path) -> Settings:
    """Read run.json. Raises LoadTestError if the folder holds no run of this tool."""
    try:
        return msgspec.json.decode((folder / RUN).read_bytes(), type=Settings)
    except (OSError, msgspec.DecodeError) as error:
        raise LoadTestError(f"{folder} holds no run that --resume could go on with: {error}") from error
