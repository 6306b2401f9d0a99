"""What a run was asked for, as run.json keeps it for `--resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.plan import COLOCATED, DISAGGREGATED, ComparePlan
from ridgeline.loadtest.run_folder import RUN

ADAPTIVE: Final = "adaptive"
VARIANTS: Final = (COLOCATED, DISAGGREGATED, ADAPTIVE)
WORKLOADS: Final = ("poisson", "conversation", "code")
FROM_FILES: Final = {"conversation": "AzureLLMInferenceTrace_conv.csv", "code": "AzureLLMInferenceTrace_code.csv"}
"""Workloads that are slices of a trace, and what Azure/AzurePublicDataset calls its file."""
SETTLE_S: Final = 0.5


class Settings(msgspec.Struct, frozen=True):
    """The options of a run; times in seconds, rates in requests/s."""

    part: Literal["map", "shift"] = "map"
    variants: tuple[str, ...] = VARIANTS
    workloads: tuple[str, ...] = WORKLOADS
    traces: dict[str, str] = {}
    """The file of each workload that is a slice of one."""
    ttft_factors: tuple[float, ...] = (2.0, 3.5, 5.0, 12.0)
    """Limits as multiples of the unloaded TTFT of the median prompt."""
    tpot_factors: tuple[float, ...] = (1.3, 2.0, 3.0, 4.0)
    """Limits as multiples of the unloaded decode step."""
    rate_factors: tuple[float, ...] = (0.7, 1.0, 1.2, 1.45, 2.0)
    """Rates as multiples of a workload's middle rate."""
    rates: dict[str, float] = {}
    """Middle rates that are given, by workload; the others are calculated."""
    requests: int = 32
    """Requests of a round."""
    most_blocks: int = 4
    """Rounds at most of each pure mode at each rate."""
    budget_s: float = 5100.0
    phase_s: float = 60.0
    """Of the second part: seconds of each of the three phases."""
    share: float = 0.8
    """Of the second part: the load of a phase, as a share of what all workers together are calculated to hold."""
    seed: int = 0
    config: str = "deploy/local.yaml"
    overrides: dict[str, str] = {}
    url: str | None = None
    """A running deployment to use; None: one is started."""

    def check(self) -> None:
        """Raise LoadTestError, which names the option, for what no round could be run with."""
        if unknown := [variant for variant in self.variants if variant not in VARIANTS]:
            raise LoadTestError(f"--variants: {', '.join(unknown)} is no mode; the modes are {', '.join(VARIANTS)}")
        if not self.pure_variants:
            raise LoadTestError(f"--variants needs {COLOCATED} or {DISAGGREGATED}, which adaptive is compared with")
        if unknown := [name for name in self.workloads if name not in WORKLOADS]:
            raise LoadTestError(f"--workloads: {', '.join(unknown)} is none of {', '.join(WORKLOADS)}")
        for name in self.workloads if self.part == "map" else ():
            if name in FROM_FILES and not Path(self.traces.get(name, "")).is_file():
                raise LoadTestError(
                    f"the workload {name} is a slice of {FROM_FILES[name]} of github.com/Azure/AzurePublicDataset: "
                    f"give --{name}-trace FILE, or leave the workload out with --workloads"
                )

    @property
    def pure_variants(self) -> tuple[str, ...]:
        """The modes that know no limits, so that one round of theirs serves all cells."""
        return tuple(variant for variant in self.variants if variant != ADAPTIVE)

    @property
    def cells(self) -> tuple[tuple[int, int], ...]:
        """Places of the TTFT and of the TPOT factor, of every cell of a map."""
        return tuple((row, column) for row in range(len(self.ttft_factors)) for column in range(len(self.tpot_factors)))

    def plan_of(self, trace: str) -> ComparePlan:
        """Return the plan of rounds of this trace, without rate and limits."""
        return ComparePlan.model_validate({"trace": trace, "seed": self.seed, "settle_s": SETTLE_S})


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
