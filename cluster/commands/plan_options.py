"""The options of `ridgeline replay` and `ridgeline compare`: one for each field of the plan, made from the plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_type_hints

import typer
from pydantic import ValidationError

from loadtest.run.plan import ReplayPlan

Refuse = Callable[[list[str]], None]
"""Ends the command with the given sentences."""


def with_plan(kind: type[ReplayPlan], refuse: Refuse) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command with a parameter `plan` an option for each field instead, and call it with the checked plan."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def call(context: typer.Context, **values: Any) -> None:
            chosen = {name: values.pop(name) for name in kind.model_fields}
            command(**values, plan=_checked(kind, _given(context, chosen), refuse))

        hints = get_type_hints(command, include_extras=True)
        own = [
            one.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, one in inspect.signature(command).parameters.items()
            if name != "plan"
        ]
        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        parameters = [context, *own, *_options(kind)]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {one.name: one.annotation for one in parameters}
        call.__name__, call.__doc__ = command.__name__, command.__doc__
        return call

    return decorate


def _options(kind: type[ReplayPlan]) -> list[inspect.Parameter]:
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[_option_type(field.annotation), typer.Option(help=field.description)],
        )
        for name, field in kind.model_fields.items()
    ]


def _option_type(annotation: Any) -> Any:
    """Return the type that the command line reads: text for a number or a word, which only the plan tells apart."""
    kinds = [one for one in get_args(annotation) if one is not type(None)]
    return str | None if float in kinds and len(kinds) > 1 else annotation


def _given(context: typer.Context, chosen: dict[str, Any]) -> dict[str, Any]:
    """Leave out what was not on the command line, so that the plan can tell a default from a choice."""
    sources = {name: context.get_parameter_source(name) for name in chosen}
    return {name: chosen[name] for name, source in sources.items() if source and source.name != "DEFAULT"}


def _checked(kind: type[ReplayPlan], given: dict[str, Any], refuse: Refuse) -> ReplayPlan:
    try:
        return kind(**given)
    except ValidationError as error:
        refuse(
            [
                f"{'.'.join(map(str, d['loc'])) or 'plan'}: {d['msg'].removeprefix('Value error, ')}"
                for d in error.errors()
            ]
        )
        raise
