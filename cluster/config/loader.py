"""Loads the one configuration: defaults (those of GPUs where a pool has some), then a YAML file, then flags.

It remembers where each value came from.

Why: wrong keys and impossible combinations should be reported before anything starts, all at once, each with the line
to change. Everything else receives the finished `RidgelineConfig`.
"""

import difflib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, get_args

import yaml
from pydantic import TypeAdapter, ValidationError
from rich.table import Table

from ridgeline.cluster.config.models import RidgelineConfig, autoscale_conflicts, conflicts
from ridgeline.contracts.section import Section
from ridgeline.contracts.vocabulary import Mode

DEFAULT_ORIGIN = "default"
FLAG_ORIGIN = "flag"
GPU_ORIGIN = "default on GPUs"
_GPU_POOLS: Final[Mapping[str, Mapping[str, Any]]] = {
    # Prompts fill steps by themselves: more sequences than a step has room for would only hold KV.
    "prefill": {"max_num_seqs": 64, "max_num_batched_tokens": 8192, "kv_cache_memory_bytes": None},
    # What is recomputed here stalls the others for one chunk; more sequences share each read of the weights.
    "decode": {"max_num_seqs": 512, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": None},
    # As vLLM's own server on a GPU of 70 GiB or more, with as many sequences as half of the decode pool's.
    "colocated": {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "kv_cache_memory_bytes": None},
}
"""Each pool's settings where its `gpus_per_worker` is above 0, for those that nobody has set.

The other defaults are those of a CPU core, which a step of 512 tokens keeps busy for two seconds. A GPU's ridge is at
hundreds of tokens of a step (H100: 295 in bfloat16), its memory is for KV, and its engine compiles at start.
"""
_GPU_SHARED: Final[dict[str, Any]] = {
    # A download of hundreds of gigabytes, torch.compile and the capture of graphs are part of a start.
    "supervision.start_timeout_s": 3600.0,
    # A kernel that is compiled or tuned at its first use takes tens of seconds in the middle of serving.
    "supervision.stall_timeout_s": 180.0,
}
"""Settings of the deployment where any pool has GPUs."""
_WHOLE_NUMBER: Final = TypeAdapter(int)


class ConfigError(ValueError):
    """The configuration cannot be used; `problems` has one sentence for each reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class LoadedConfig:
    """A checked configuration, and for each setting (`server.port`) where its value came from."""

    config: RidgelineConfig
    origins: Mapping[str, str]


@dataclass(frozen=True)
class _Assignment:
    path: str
    value: Any
    origin: str


def load_config(
    path: Path | str | None = None, overrides: Mapping[str, str] | None = None, *, both_modes: bool = False
) -> LoadedConfig:
    """Merge defaults, the YAML file at `path` and `overrides` (`{"server.port": "8001"}`, values as in YAML).

    Raises ConfigError with every problem found: unknown keys, wrong values, impossible combinations in its mode, or
    in either if it is for `both_modes`.
    """
    problems: list[str] = []
    assignments: list[_Assignment] = []
    if path is not None:
        assignments += _read_file(Path(path), problems)
    assignments += _read_overrides(overrides or {}, problems)
    values: dict[str, Any] = RidgelineConfig().model_dump()
    origins = dict.fromkeys(_LEAVES, DEFAULT_ORIGIN)
    for assignment in assignments:
        leaf = _leaf_of(assignment.path)
        if leaf is None:
            problems.append(_not_a_setting(assignment))
            continue
        if _assign(values, assignment.path, assignment.value):
            origins[leaf] = assignment.origin
    _fill_in_gpu_defaults(values, origins)
    config = _validate(values, origins, problems)
    if config is not None:
        modes = get_args(Mode) if both_modes else (config.mode,)
        found = (sentence for mode in modes for sentence in conflicts(config.model_copy(update={"mode": mode})))
        problems += dict.fromkeys(found)
        if not both_modes:  # a comparison leaves its pools as they are
            problems += autoscale_conflicts(config)
    if config is None or problems:
        raise ConfigError(problems)
    return LoadedConfig(config=config, origins=origins)


def explain(loaded: LoadedConfig) -> Table:
    """Build a table of every effective value and where it came from."""
    table = Table(title="effective configuration", title_justify="left")
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", overflow="fold")
    for path, origin in loaded.origins.items():
        style = "dim" if origin in (DEFAULT_ORIGIN, GPU_ORIGIN) else None
        table.add_row(path, _shown(path, attrgetter(path)(loaded.config)), origin, style=style)
    return table


def _fields(model: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section] | None]]:
    """Yield each dotted name below a model, and its model if it is a section."""
    for name, info in model.model_fields.items():
        kind: Any = info.annotation
        section = kind if isinstance(kind, type) and issubclass(kind, Section) else None
        yield prefix + name, section
        if section is not None:
            yield from _fields(section, f"{prefix}{name}.")


_SECTIONS = {path: section for path, section in _fields(RidgelineConfig) if section is not None}
_LEAVES = [path for path, section in _fields(RidgelineConfig) if section is None]


_TABLE_NAMES = ("resources", "engine_args", "server_args", "options", "adaptive", "levels")
_TABLES = [path for path in _LEAVES if path.rpartition(".")[2] in _TABLE_NAMES]


def _leaf_of(path: str) -> str | None:
    """Find the setting that a path assigns to: itself, or a table such as `resources` for one of its entries."""
    if path in _LEAVES:
        return path
    return next((table for table in _TABLES if path.startswith(f"{table}.")), None)


def _read_file(path: Path, problems: list[str]) -> list[_Assignment]:
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if root is None:
            return []
        problems += (
            f"{path}:{line}: {name} is already set in line {first}: remove one of them."
            for name, line, first in _given_twice(root)
        )
        return list(_walk(root, "", path, problems))
    except OSError as error:
        problems.append(f"{path}: cannot be read ({error.strerror}); name an existing YAML file.")
    except UnicodeDecodeError:
        problems.append(f"{path}: is not UTF-8 text; name a YAML file.")
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        problems.append(f"{path}{line}: is not valid YAML: {error.problem}.")
    except yaml.YAMLError as error:  # a character that YAML forbids has no line
        problems.append(f"{path}: is not valid YAML: {' '.join(str(error).split())}.")
    return []


def _given_twice(
    node: yaml.Node, prefix: str = "", above: tuple[yaml.Node, ...] = ()
) -> Iterator[tuple[str, int, int]]:
    """Yield each key that its mapping already has, which YAML would silently replace, its line and the first one's."""
    if not isinstance(node, yaml.MappingNode) or node in above:
        return
    first_lines: dict[str, int] = {}
    for key, value in node.value:
        name, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if name in first_lines:
            yield name, line, first_lines[name]
        first_lines.setdefault(name, line)
        yield from _given_twice(value, f"{name}.", (*above, node))


def _value_of(node: yaml.Node | None) -> Any:
    """Return what a tree says, as yaml.safe_load would. Raises yaml.YAMLError."""
    if node is None:
        return None
    whole = deepcopy(node)  # to merge (`<<`) changes it
    try:
        return yaml.SafeLoader("").construct_object(whole, deep=True)
    except (ArithmeticError, AttributeError, LookupError, ValueError) as error:  # such as 2026-13-45 or !!int many
        problem = "a value looks like a number or a date and is none; quote it if it is text"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error


def _walk(node: yaml.Node, prefix: str, file: Path, problems: list[str]) -> Iterator[_Assignment]:
    """Turn a YAML tree into assignments, each with the line of its key."""
    if not isinstance(node, yaml.MappingNode):
        if _value_of(node) is not None:  # an empty section keeps its defaults
            where = f"{file}:{node.start_mark.line + 1}: {prefix.rstrip('.') or 'the file'}"
            problems.append(f"{where} is a section: write `key: value` lines in it.")
        return
    for key_node, value_node in node.value:
        path = f"{prefix}{key_node.value}"
        if path in _SECTIONS:
            yield from _walk(value_node, f"{path}.", file, problems)
        else:
            yield _Assignment(path, _value_of(value_node), f"{file}:{key_node.start_mark.line + 1}")


def _read_overrides(overrides: Mapping[str, str], problems: list[str]) -> Iterator[_Assignment]:
    for path, text in overrides.items():
        try:
            yield _Assignment(path, _value_of(yaml.compose(text, Loader=yaml.SafeLoader)), FLAG_ORIGIN)
        except yaml.YAMLError:
            problems.append(f"{FLAG_ORIGIN}: {path}: {text!r} is not a valid value; quote it as in YAML.")


def _not_a_setting(assignment: _Assignment) -> str:
    path = assignment.path
    start = f"{assignment.origin}: {path}"
    if path in _SECTIONS:
        return f"{start} is a section: set one of {', '.join(_children(path))}."
    if path == "config":
        return f"{start} is not a setting, but a section of the Helm chart's values: give a file with what is under it."
    parent, _, name = path.rpartition(".")
    near = [leaf for leaf in _LEAVES if leaf.rpartition(".")[2] == name] or difflib.get_close_matches(
        path, _LEAVES, n=1
    )
    if near:
        return f"{start} is not a setting: did you mean {' or '.join(near)}?"
    return f"{start} is not a setting: the nearest are {', '.join(_children(parent) or _children(''))}."


def _children(section: str) -> list[str]:
    return [path for path, _ in _fields(RidgelineConfig) if path.rpartition(".")[0] == section]


def _assign(values: dict[str, Any], path: str, value: Any) -> bool:
    """Set what a path names; False if that is an entry of a table that is none, which is left for the validation."""
    leaf = _leaf_of(path)
    assert leaf is not None
    *sections, name = leaf.split(".")
    for section in sections:
        values = values[section]
    if path == leaf:
        values[name] = value
        return True
    if not isinstance(values[name], dict | None):
        return False
    # One entry of a table; its name may itself contain dots.
    values[name] = {**(values[name] or {}), path.removeprefix(f"{leaf}."): value}
    return True


def _fill_in_gpu_defaults(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Set what nobody has set where pools have GPUs; none of it has been checked yet."""
    with_gpus = [name for name in _GPU_POOLS if _has_gpus(values["pools"][name].get("gpus_per_worker"))]
    found = {f"pools.{name}.{setting}": value for name in with_gpus for setting, value in _GPU_POOLS[name].items()}
    adaptive = values["pools"]["adaptive"]  # one setting
    on_gpus = isinstance(adaptive, dict) and _has_gpus(adaptive.get("gpus_per_worker"))
    if on_gpus:
        adaptive.setdefault("kv_cache_memory_bytes", None)
    for setting, value in (found | (_GPU_SHARED if with_gpus or on_gpus else {})).items():
        if origins[setting] == DEFAULT_ORIGIN:
            _assign(values, setting, value)
            origins[setting] = GPU_ORIGIN


def _has_gpus(number: object) -> bool:
    try:
        return _WHOLE_NUMBER.validate_python(number) > 0  # as the setting is read: 1.0 and "1" are 1
    except ValidationError:
        return False


def _validate(values: dict[str, Any], origins: Mapping[str, str], problems: list[str]) -> RidgelineConfig | None:
    try:
        return RidgelineConfig.model_validate(values)
    except ValidationError as error:
        for detail in error.errors():
            path = ".".join(str(part) for part in detail["loc"])
            origin = _origin_of_error(detail["loc"], origins)
            message = detail["msg"][0].lower() + detail["msg"][1:]
            problems.append(f"{origin}: {path}: {message}, not {detail['input']!r}.")
        return None


def _origin_of_error(location: tuple[int | str, ...], origins: Mapping[str, str]) -> str:
    """Say where what is wrong was set: a setting, an element of its list or table, or a section as a whole."""
    parts = [str(part) for part in location]
    paths = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    if leaf := next((path for path in paths if path in origins), None):
        return origins[leaf]
    below = (origin for leaf, origin in origins.items() if leaf.startswith(f"{paths[0]}."))
    return next((origin for origin in below if origin != DEFAULT_ORIGIN), DEFAULT_ORIGIN)


def _shown(path: str, value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    if path.endswith("_bytes") and isinstance(value, int):
        return f"{value} ({value / 1024**2:,.0f} MiB)"
    return "null" if value is None else str(value)
