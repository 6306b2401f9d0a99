"""The options of `ridgeline replay` and `ridgeline compare`: one for each field of the plan, made from the plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ridgeline.loadtest.plan import NumberOrAuto, ReplayPlan

Refuse = Callable[[list[str]], None]
"""Ends the command with the given sentences."""


def with_plan(kind: type[ReplayPlan], refuse: Refuse) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command with a parameter `plan` an option for each field instead, and call it with the checked plan.

    Fields that are fixed have none.
    """
    offered = [name for name in kind.model_fields if name not in kind.fixed]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def call(context: typer.Context, **values: Any) -> None:
            chosen = {name: values.pop(name) for name in offered}
            command(**values, plan=_checked(kind, _given(context, chosen), refuse))

        hints = get_type_hints(command, include_extras=True)
        own = [
            one.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, one in inspect.signature(command).parameters.items()
            if name != "plan"
        ]
        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        parameters = [context, *own, *(_option(kind, field) for field in offered)]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {one.name: one.annotation for one in parameters}
        call.__name__, call.__doc__ = command.__name__, command.__doc__
        return call

    return decorate


def _option(kind: type[ReplayPlan], name: str) -> inspect.Parameter:
    """Return the option of a field.

    A number or the word auto is text to typer, and only the plan tells them apart.
    """
    field = kind.model_fields[name]
    annotation: Any = str | None if field.annotation == NumberOrAuto else field.annotation
    metavar = "NUMBER|auto" if field.annotation == NumberOrAuto else None
    help_text = (field.description or "").replace("\n", " ")
    option = typer.Option(help=help_text, metavar=metavar, show_default=name not in kind.follow)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[annotation, option]
    )


def _given(context: typer.Context, chosen: dict[str, Any]) -> dict[str, Any]:
    """Leave out what was not on the command line, so that the plan can tell a default from a choice."""
    sources = {name: context.get_parameter_source(name) for name in chosen}
    return {name: chosen[name] for name, source in sources.items() if source and source.name != "DEFAULT"}


def _checked(kind: type[ReplayPlan], given: dict[str, Any], refuse: Refuse) -> ReplayPlan:
    try:
        return kind(**given)
    except ValidationError as error:
        refuse([_sentence(str(one["loc"][0]) if one["loc"] else "plan", one) for one in error.errors()])
        raise


def _sentence(field: str, error: ErrorDetails) -> str:
    if error["type"] == "value_error":
        return f"{field}: {error['msg'].removeprefix('Value error, ')}"
    return f"{field}: {error['msg'].removeprefix('Input ')}, not {error['input']}"
