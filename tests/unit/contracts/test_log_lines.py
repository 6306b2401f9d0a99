"""Log lines: what one holds as text and as JSON, which are written, and settings that name no module."""

import json
import logging

import pytest
from pydantic import ValidationError

from ridgeline.contracts.log_lines import LineFormatter, LoggingConfig, ProcessLogging, configure_as_told

LOGGER = logging.getLogger("ridgeline.router.dispatch")
FACTS = {"request": "cmpl-1 \n2", "worker": "worker-0"}


@pytest.fixture(autouse=True)
def _as_it_was():
    names = ("ridgeline", "ridgeline.router", "ridgeline.router.dispatch", "ridgeline.engine", "vllm.v1")
    handlers, levels = logging.root.handlers[:], {name: logging.getLogger(name).level for name in names}
    yield
    logging.root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def record(facts, error=None):
    exc_info = (type(error), error, None) if error else None
    return LOGGER.makeRecord(LOGGER.name, logging.INFO, "f", 1, "goes %s", ("on",), exc_info, extra=facts)


def test_a_line_of_json_has_the_change_whose_it_is_and_what_failed():
    line = LineFormatter("json", "router").format(record(FACTS, ValueError("no\nroom")))
    told = json.loads(line)
    assert told.pop("time").endswith("+00:00")
    assert told.pop("error") == "ValueError: no\nroom"
    assert told == {
        "level": "info",
        "process": "router",
        "module": "ridgeline.router.dispatch",
        "message": "goes on",
        **FACTS,
    }
    assert "\n" not in line


def test_a_line_of_text_has_the_same_and_no_fact_can_begin_another_line():
    line = LineFormatter("text", "worker-1").format(record(FACTS))
    assert line.partition(" ")[2] == (
        'info worker-1 ridgeline.router.dispatch: goes on request="cmpl-1 \\n2" worker="worker-0"'
    )


@pytest.mark.parametrize(
    ("settings", "written"),
    [
        ({}, ["info", "warning"]),
        ({"level": "debug"}, ["debug", "info", "warning"]),
        ({"level": "error"}, []),
        ({"level": "error", "levels": {"ridgeline.router": "info"}}, ["info", "warning"]),
        ({"levels": {"ridgeline.router": "debug", "ridgeline.router.dispatch": "warning"}}, ["warning"]),
        ({"levels": {"ridgeline.engine": "error"}}, ["info", "warning"]),
    ],
    ids=str,
)
def test_a_process_writes_from_the_level_of_the_nearest_module_on(capsys, settings, written):
    configure_as_told(ProcessLogging(format="json", process="router", **settings).variables())
    for level in (logging.DEBUG, logging.INFO, logging.WARNING):
        LOGGER.log(level, "a change")
    assert [json.loads(line)["level"] for line in capsys.readouterr().err.splitlines()] == written


def test_libraries_write_from_warnings_on_unless_they_have_a_level(capsys):
    configure_as_told(ProcessLogging(process="router", levels={"vllm.v1": "info"}).variables())
    for name in ("vllm", "vllm.v1.engine", "another"):
        logging.getLogger(name).info("says")
        logging.getLogger(name).warning("warns")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        "warning router vllm: warns",
        "info router vllm.v1.engine: says",
        "warning router vllm.v1.engine: warns",
        "warning router another: warns",
    ]


def test_a_process_that_was_told_nothing_is_left_as_it_is():
    before = logging.root.handlers[:]
    configure_as_told({"PATH": "/bin"})
    assert logging.root.handlers == before


@pytest.mark.parametrize("module", ["ridgeline.routr", "ridgeline.router.nothing.here", "router", "vlm", "", "."])
def test_a_module_that_does_not_exist_is_refused_with_the_fix(module):
    with pytest.raises(ValidationError, match=r"is no module: write ridgeline\.router\.dispatch"):
        LoggingConfig(levels={module: "debug"})
    assert "vllm" in LoggingConfig(levels={"vllm": "info", "ridgeline.worker_runtime": "debug"}).levels
