"""Writes docs/reference/settings.md and docs/reference/cli.md from the code. A test holds that they are current.

`python -m tools.docs.reference`
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic import BaseModel
from typer.cli import get_docs_for_click

from ridgeline.cluster.cli import app
from ridgeline.cluster.config.models import RidgelineConfig

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
UNITS = {"s": "seconds", "ms": "milliseconds", "bytes": "bytes", "tokens": "tokens"}
"""By the ending of a setting's name."""


def sections(model: BaseModel, path: str = "") -> Iterator[tuple[str, BaseModel]]:
    """Yield each section with its path, before the sections in it."""
    yield path, model
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from sections(value, f"{path}.{name}" if path else name)


def type_name(annotation: Any) -> str:
    """Return a setting's type in one or a few words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is dict:
        return "table"
    if origin is tuple:
        return "list"
    if arguments and all(isinstance(value, str) for value in arguments):
        return ", ".join(f"`{value}`" for value in arguments)
    if arguments:
        return " or ".join("null" if one is type(None) else type_name(one) for one in arguments)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    words = {bool: "boolean", int: "integer", float: "number", str: "text"}
    return words.get(annotation, str(annotation))


def unit(name: str) -> str:
    """Return the unit that a setting's name ends in, if it does."""
    ending = re.search(r"_(s|ms|bytes|tokens)$", name)
    return UNITS[ending[1]] if ending else ""


def default(values: dict[str, Any]) -> str:
    """Return the default of a setting in each of these sections, or once if they agree."""
    by_value: dict[str, list[str]] = {}
    for path, value in values.items():
        by_value.setdefault(json.dumps(value, default=str), []).append(path.rpartition(".")[2])
    if len(by_value) == 1:
        return f"`{next(iter(by_value))}`"
    return "; ".join(f"`{value}` ({', '.join(sections)})" for value, sections in by_value.items())


def settings_page() -> str:
    """Return a table of settings for each kind of section."""
    lines = [
        "# Settings",
        "",
        "Every setting with its type, unit and default, from `cluster/config/models.py`. "
        "[Configuration](configuration.md) explains what needs more than a line.",
    ]
    alike: dict[type[BaseModel], dict[str, BaseModel]] = {}
    for path, section in sections(RidgelineConfig()):
        alike.setdefault(type(section), {})[path] = section
    for kind, by_path in alike.items():
        rows = [
            f"| `{name}` | {type_name(field.annotation)} | {unit(name)} "
            f"| {default({path: getattr(section, name) for path, section in by_path.items()})} "
            f"| {(field.description or '').replace('|', '&#124;')} |"
            for name, field in kind.model_fields.items()
            if not any(isinstance(getattr(section, name), BaseModel) for section in by_path.values())
        ]
        if rows:
            lines += ["", f"## {', '.join(by_path) or 'Top level'}", ""]
            lines += ["| setting | type | unit | default | meaning |", "|---|---|---|---|---|", *rows]
    return "\n".join([*lines, ""])


def cli_page() -> str:
    """Return every command with its arguments and options, as typer documents them."""
    command = typer.main.get_command(app)
    return get_docs_for_click(obj=command, ctx=typer.Context(command), name="ridgeline", title="Command line") + "\n"


PAGES = {"settings.md": settings_page, "cli.md": cli_page}


def main() -> None:
    """Write both pages."""
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page())


if __name__ == "__main__":
    main()
