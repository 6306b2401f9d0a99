"""Log lines: one for each change of state, as text or as JSON, with the ids of its request and its worker.

`logger.debug("decoding", extra={"request": request_id, "worker": worker_id})`: the message says what has changed, and
`extra` whose it is. Nothing is logged per token. A process that writes no lines yet begins with `configure`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ridgeline.contracts.section import Section

Level = Literal["debug", "info", "warning", "error"]
OTHERS = ("vllm", "uvicorn")
"""Libraries whose lines have a level of their own; they may not be installed where the settings are read."""
VARIABLE = "RIDGELINE_LOGGING"
"""Variable with the settings of a process, for what it starts; set by us, no setting."""
_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def _module(name: str) -> str:
    top = name.partition(".")[0]
    if top in OTHERS or (top == "ridgeline" and _exists(name)):
        return name
    raise ValueError(
        f"{name!r} is no module: write ridgeline.router.dispatch, one that exists, or {' or '.join(OTHERS)}"
    )


def _exists(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it should be in
        return False


class LoggingConfig(Section):
    """What the driver, routers, workers and engines log."""

    format: Literal["text", "json"] = Field(
        default="text", description="text, or json: an object a line, for programs that collect logs"
    )
    level: Level = Field(
        default="info",
        description="the least severe lines that are written; info: changes of workers, modes and failed requests; "
        "debug: each change of each request as well, about a dozen lines",
    )
    levels: dict[Annotated[str, AfterValidator(_module)], Level] = Field(
        default_factory=dict,
        description="other levels, by module with all below it: {ridgeline.router.dispatch: debug, vllm: info}",
    )


class ProcessLogging(LoggingConfig):
    """The settings of one process."""

    process: str
    """What it calls itself in its lines: the id of a worker, router-0, dispatcher, serve."""

    def variables(self) -> dict[str, str]:
        """Return the environment by which a process that is started has these settings."""
        return {VARIABLE: self.model_dump_json()}


class LineFormatter(logging.Formatter):
    """Writes a record as one line of text or JSON; an exception's traceback is a field of the latter."""

    def __init__(self, form: Literal["text", "json"], process: str) -> None:
        super().__init__()
        self._form, self._process = form, process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        facts = {name: value for name, value in vars(record).items() if name not in _OF_EVERY_RECORD and name[0] != "_"}
        error = self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""
        level, message = record.levelname.lower(), record.getMessage()
        if self._form == "json":
            line = {"time": moment, "level": level, "process": self._process, "module": record.name, "message": message}
            return _json(line | facts | ({"error": error} if error else {}))
        told = "".join(f" {name}={_json(value)}" for name, value in facts.items())
        return f"{moment} {level} {self._process} {record.name}: {message}{told}" + (f"\n{error}" if error else "")


def _json(value: object) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def configure(settings: ProcessLogging) -> None:
    """Have this process write its lines to standard error, and those of the libraries in it from warnings on."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(settings.format, settings.process))
    logging.root.handlers[:] = [handler]
    levels: Mapping[str, Level] = {"ridgeline": settings.level, **settings.levels}
    for module, level in levels.items():
        logging.getLogger(module).setLevel(level.upper())


def configure_as_told(environment: Mapping[str, str] = os.environ) -> None:
    """The same with the settings that whoever started this process has left in its environment, if there are any."""
    if (told := environment.get(VARIABLE)) is not None:
        configure(ProcessLogging.model_validate_json(told))
