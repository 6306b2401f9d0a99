"""The file of `ridgeline compare --grid`: for each mode, named candidates that override the configuration."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from ridgeline.cluster.config.loader import ConfigError, given_twice, invalid_yaml, read_yaml, value_of
from ridgeline.cluster.config.models import RidgelineConfig, conflicts
from ridgeline.contracts.vocabulary import Mode

AS_CONFIGURED = "as-configured"
MAY_CHANGE: dict[Mode, tuple[str, ...]] = {
    "colocated": ("pools.colocated", "router", "engine_args"),
    "disaggregated": ("pools.prefill", "pools.decode", "transfer", "router", "engine_args"),
    "adaptive": ("pools.adaptive", "transfer", "router", "engine_args"),
}
"""What a candidate may override. Model, server, machines and keys are the same for both variants."""


class TuningGrid(BaseModel):
    """The content of the file; a mode that it leaves out runs as configured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    colocated: dict[str, dict[str, Any]] = {AS_CONFIGURED: {}}
    disaggregated: dict[str, dict[str, Any]] = {AS_CONFIGURED: {}}
    adaptive: dict[str, dict[str, Any]] = {AS_CONFIGURED: {}}

    @field_validator("colocated", "disaggregated", "adaptive", mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {name: {} if overrides is None else overrides for name, overrides in value.items()}

    @field_validator("colocated", "disaggregated", "adaptive")
    @classmethod
    def _some(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        if not value:
            raise ValueError(f"needs a candidate, such as {AS_CONFIGURED}: {{}}, or leave the mode out")
        return value


@dataclass(frozen=True, slots=True)
class CandidateConfig:
    """One candidate of a mode, with the whole configuration that it stands for."""

    mode: Mode
    name: str
    overrides: Mapping[str, Any]
    config: RidgelineConfig

    @property
    def title(self) -> str:
        """Its name in sentences."""
        return f"candidate {self.name} of {self.mode}"


CandidateConfigs = Mapping[Mode, tuple[CandidateConfig, ...]]


def read_grid(path: Path, base: RidgelineConfig) -> CandidateConfigs:
    """Return the candidates of each mode in the order of the file. Raises ConfigError with every problem."""
    grid, problems = _read(path), []
    found: dict[Mode, tuple[CandidateConfig, ...]] = {}
    for mode in get_args(Mode):
        candidates = []
        for name, overrides in getattr(grid, mode).items():
            try:
                candidates.append(candidate_of(base, mode, name, overrides))
            except ConfigError as error:
                problems += [f"{path}: {problem}" for problem in error.problems]
        found[mode] = tuple(candidates)
    if problems:
        raise ConfigError(problems)
    return found


def candidate_of(base: RidgelineConfig, mode: Mode, name: str, overrides: Mapping[str, Any]) -> CandidateConfig:
    """Return a candidate: the configuration with these overrides, in this mode alone. Raises ConfigError."""
    title = f"candidate {name} of {mode}"
    if foreign := [path for path in _paths(overrides) if path not in MAY_CHANGE[mode]]:
        raise ConfigError([f"{title} sets {', '.join(foreign)}: it may set {', '.join(MAY_CHANGE[mode])}"])
    values = _merged(base.model_dump(), overrides) | {"mode": mode, "fixed_mode": True}
    try:
        config = RidgelineConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(
            [f"{title}: {'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        ) from error
    problems = conflicts(config)
    if _resources(config) != _resources(base):
        problems.append("resources are those of the nodes: set them in the configuration, for all candidates")
    if problems:
        raise ConfigError([f"{title}: {problem}" for problem in problems])
    return CandidateConfig(mode, name, overrides, config)


def both_variants(colocated: CandidateConfig, disaggregated: CandidateConfig) -> RidgelineConfig:
    """Return one configuration with the pools of both candidates, of which neither may set the other's."""
    split = disaggregated.config
    return split.model_copy(
        update={"pools": split.pools.model_copy(update={"colocated": colocated.config.pools.colocated})}
    )


def _read(path: Path) -> TuningGrid:
    root = read_yaml(path)
    if root is not None and (twice := list(given_twice(root))):
        raise ConfigError([f"{path}:{line}: {name} is there already: remove one of them" for name, line in twice])
    try:
        return TuningGrid.model_validate({} if root is None else value_of(root) or {})
    except yaml.YAMLError as error:
        raise ConfigError([invalid_yaml(path, error)]) from error
    except ValidationError as error:
        raise ConfigError(
            [
                f"{path}: {'.'.join(map(str, one['loc'])) or 'the file'}: {one['msg'].removeprefix('Value error, ')}; "
                "its keys are colocated, disaggregated and adaptive, and below them names with settings"
                for one in error.errors()
            ]
        ) from error


def _paths(overrides: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is set, as section and key."""
    for section, values in overrides.items():
        if section == "pools" and isinstance(values, Mapping):
            yield from (f"{section}.{pool}" for pool in values)
        else:
            yield str(section)


def _merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with the overrides on top, section by section."""
    merged = dict(values)
    for name, value in overrides.items():
        old = merged.get(name)
        merged[name] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _resources(config: RidgelineConfig) -> list[Mapping[str, float]]:
    return [config.router.resources, *(pool.resources for pool in config.all_pools().values())]
