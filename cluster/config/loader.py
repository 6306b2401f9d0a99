"""Loads the one configuration: defaults (those of GPUs where a pool has some), then a YAML file, then flags.

It remembers where each value came from.

Why: wrong keys and impossible combinations should be reported before anything starts, all at once, each with the line
to change. Everything else receives the finished `RidgelineConfig`.
"""

import difflib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from rich.table import Table

from ridgeline.cluster.config.autoscale import autoscale_conflicts
from ridgeline.cluster.config.gpu_defaults import GPU_ORIGIN, fill_adaptive, gpu_defaults
from ridgeline.cluster.config.models import RidgelineConfig, conflicts
from ridgeline.contracts.section import Section
from ridgeline.contracts.vocabulary import Mode, Pool

DEFAULT_ORIGIN = "default"
FLAG_ORIGIN = "flag"


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
    for setting, default in gpu_defaults(values):
        if origins[setting] == DEFAULT_ORIGIN:
            _assign(values, setting, default)
            origins[setting] = GPU_ORIGIN
    fill_adaptive(values)
    config = _validate(values, origins, problems)
    if config is not None:
        modes = get_args(Mode) if both_modes else (config.mode,)
        found = (sentence for mode in modes for sentence in conflicts(config.model_copy(update={"mode": mode})))
        problems += dict.fromkeys(found)
        if not both_modes:  # a comparison leaves its pools as they are
            problems += autoscale_conflicts(config.autoscale, config.mode, *_workers(config), config.sections_of)
    if config is None or problems:
        raise ConfigError(problems)
    return LoadedConfig(config=config, origins=origins)


def _workers(config: RidgelineConfig) -> tuple[dict[Pool, int], dict[Pool, int]]:
    """Return the number of workers of each pool of this mode, and of each pool of the modes that it may change to."""
    now = {pool: settings.workers for pool, settings in config.active_pools().items()}
    others = {} if config.fixed_mode else {pool: settings.workers for pool, settings in config.all_pools().items()}
    return now, others


def explain(loaded: LoadedConfig) -> Table:
    """Build a table of every effective value and where it came from."""
    table = Table(title="effective configuration", title_justify="left")
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", overflow="fold")
    values = loaded.config.model_dump()
    for path, origin in loaded.origins.items():
        style = "dim" if origin in (DEFAULT_ORIGIN, GPU_ORIGIN) else None
        table.add_row(path, _shown(path, _look_up(values, path)), origin, style=style)
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


_TABLE_NAMES = ("resources", "engine_args", "server_args", "options", "adaptive")
_TABLES = [path for path in _LEAVES if path.rpartition(".")[2] in _TABLE_NAMES]


def _leaf_of(path: str) -> str | None:
    """Find the setting that a path assigns to: itself, or a table such as `resources` for one of its entries."""
    if path in _LEAVES:
        return path
    return next((table for table in _TABLES if path.startswith(f"{table}.")), None)


def read_yaml(path: Path) -> yaml.Node | None:
    """Return the tree of a YAML file, with the line of each key; None if it is empty. Raises ConfigError."""
    try:
        root: yaml.Node | None = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror}); name an existing YAML file."]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: is not UTF-8 text; name a YAML file."]) from error
    except yaml.YAMLError as error:
        raise ConfigError([invalid_yaml(path, error)]) from error
    return root


def value_of(node: yaml.Node) -> Any:
    """Return what a tree says, as yaml.safe_load would. Raises yaml.YAMLError."""
    whole = deepcopy(node)  # to merge (`<<`) changes it
    try:
        return yaml.SafeLoader("").construct_object(whole, deep=True)
    except (ArithmeticError, AttributeError, LookupError, ValueError) as error:  # such as 2026-13-45 or !!int many
        problem = "a value looks like a number or a date and is none; quote it if it is text"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error


def given_twice(node: yaml.Node, above: tuple[yaml.Node, ...] = ()) -> Iterator[tuple[str, int]]:
    """Yield each key that its mapping already has, which YAML would silently replace, with its line."""
    if not isinstance(node, yaml.MappingNode) or node in above:
        return
    seen = set()
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                yield key.value, key.start_mark.line + 1
            seen.add(key.value)
        yield from given_twice(value, (*above, node))


def _read_file(path: Path, problems: list[str]) -> list[_Assignment]:
    try:
        root = read_yaml(path)
        return [] if root is None else list(_walk(root, "", path, problems))
    except ConfigError as error:
        problems += error.problems
    except yaml.YAMLError as error:  # in a value, such as a tag that nobody knows
        problems.append(invalid_yaml(path, error))
    return []


def invalid_yaml(path: Path, error: yaml.YAMLError) -> str:
    """Say why a file is not YAML, and in which line if that is known."""
    if not isinstance(error, yaml.MarkedYAMLError):  # a character that YAML forbids has no line
        return f"{path}: is not valid YAML: {' '.join(str(error).split())}."
    line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
    return f"{path}{line}: is not valid YAML: {error.problem}."


def _walk(node: yaml.Node, prefix: str, file: Path, problems: list[str]) -> Iterator[_Assignment]:
    """Turn a YAML tree into assignments, each with the line of its key."""
    if not isinstance(node, yaml.MappingNode):
        if value_of(node) is not None:  # an empty section keeps its defaults
            where = f"{file}:{node.start_mark.line + 1}"
            problems.append(
                f"{where}: {prefix.rstrip('.') or 'the file'} is a section: write `key: value` lines in it."
            )
        return
    first_lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        path = f"{prefix}{key_node.value}"
        if path in first_lines:
            problems.append(f"{file}:{line}: {path} is already set in line {first_lines[path]}: remove one of them.")
        first_lines.setdefault(path, line)
        if path in _SECTIONS:
            yield from _walk(value_node, f"{path}.", file, problems)
        else:
            problems += (
                f"{file}:{again}: {name} is already set in {path}: remove one of them."
                for name, again in given_twice(value_node)
            )
            yield _Assignment(path, value_of(value_node), f"{file}:{line}")


def _read_overrides(overrides: Mapping[str, str], problems: list[str]) -> Iterator[_Assignment]:
    for path, text in overrides.items():
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            yield _Assignment(path, None if root is None else value_of(root), FLAG_ORIGIN)
        except yaml.YAMLError:
            problems.append(f"{FLAG_ORIGIN}: {path}: {text!r} is not a valid value; quote it as in YAML.")


def _not_a_setting(assignment: _Assignment) -> str:
    path = assignment.path
    start = f"{assignment.origin}: {path}"
    if path in _SECTIONS:
        return f"{start} is a section: set one of {', '.join(_children(path))}."
    parent, _, name = path.rpartition(".")
    near = difflib.get_close_matches(name, [_last(child) for child in _children(parent)], n=1)
    if near:
        return f"{start} is not a setting: did you mean {parent + '.' if parent else ''}{near[0]}?"
    elsewhere = difflib.get_close_matches(path, _LEAVES, n=1) or [leaf for leaf in _LEAVES if _last(leaf) == name]
    if elsewhere:
        return f"{start} is not a setting: did you mean {' or '.join(elsewhere)}?"
    known = _children(parent) or _children("")
    return f"{start} is not a setting: the nearest are {', '.join(known)}."


def _children(section: str) -> list[str]:
    return [path for path, _ in _fields(RidgelineConfig) if path.rpartition(".")[0] == section]


def _last(path: str) -> str:
    return path.rpartition(".")[2]


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


def _look_up(values: Mapping[str, Any], path: str) -> Any:
    found: Any = values
    for name in path.split("."):
        found = found[name]
    return found


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
