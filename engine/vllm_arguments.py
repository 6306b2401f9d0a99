"""Converts the arguments that a configuration passes on (`ridgeline.engine.passed_args`) to vLLM's types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from ridgeline.engine.passed_args import words


def engine_values(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of AsyncEngineArgs. Raises ValueError with vLLM's message if its parser refuses them."""
    if not args:
        return {}
    parsed = refusing(AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())).parse_args(words(args))
    return {name: getattr(parsed, name) for name, value in args.items() if value is not None}


def refusing(parser: Any) -> Any:
    """Make the parser raise ValueError instead of ending the process, and return it."""
    parser.error = _refuse
    return parser


def _refuse(sentence: str) -> NoReturn:
    raise ValueError(f"vLLM refuses engine_args: {sentence}")
