"""Gives the arguments that a configuration passes on (`engine.passed_args`) the types that vLLM wants them in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from engine.passed_args import words


def engine_values(args: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs. Raises ValueError with vLLM's own words for what its parser refuses."""
    if not args:
        return {}
    parsed = refusing(AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())).parse_args(words(args))
    return {name: getattr(parsed, name) for name, value in args.items() if value is not None}


def refusing(parser: Any) -> Any:
    """The parser, which raises ValueError instead of ending the process."""
    parser.error = _refuse
    return parser


def _refuse(sentence: str) -> NoReturn:
    raise ValueError(f"vLLM refuses engine_args: {sentence}")
