"""summary.schema.json, against summaries that have every optional part, and against what is not in it."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest

from ridgeline.loadtest.report.pools import describe_pools
from ridgeline.loadtest.report.rounds import Interruption, Round, interruptions_summary, round_summary
from ridgeline.loadtest.report.summary import SCHEMA
from ridgeline.loadtest.run.calibration import Load
from ridgeline.loadtest.run.client.process import ClientLoad
from ridgeline.loadtest.run.machine import Disturbance
from ridgeline.loadtest.run.unloaded import Unloaded
from tests.support.summary_schema import SCHEMA_FILE, VALIDATOR, schema_problems
from tests.unit.loadtest.report.test_rounds import PLAN, comparison_summary, replayed
from tests.unit.loadtest.report.test_summary import AFTER, STEPS, counted


@pytest.fixture
def summary():
    return comparison_summary()[0]


def test_the_schema_is_valid_and_its_id_is_the_one_that_summaries_name(summary):
    VALIDATOR.check_schema(VALIDATOR.schema)
    assert VALIDATOR.schema["$id"] == summary["schema"] == SCHEMA
    assert SCHEMA_FILE.read_text().endswith("\n")


def test_a_comparison_is_of_the_schema(summary):
    assert schema_problems(summary) == []
    later = datetime.now(UTC)
    summary["interruptions"] = interruptions_summary([Interruption(later, later + timedelta(seconds=3))])
    summary["setup"] = {"configuration": {}, "versions": {}}
    assert schema_problems(summary) == []


def test_rounds_with_all_figures_and_with_none_are_of_the_schema(summary):
    client = ClientLoad(1.0, 0.1, 0.1, 0.2, 0.3, 10.0, 0, (0, 1), 0)
    result = replayed(0.1, 0.04)
    whole = dataclasses.replace(result, metrics=counted(AFTER + STEPS), client=client)
    lost = Round("a", 0, datetime.now(UTC), None, Disturbance(0.0, 0.2), ("a worker restarted",), False)
    kept = Round("b", 0, datetime.now(UTC), whole, None, (), True)
    summary["rounds"] = [round_summary(each, "colocated", PLAN) for each in (lost, kept)]
    assert summary["rounds"][1]["pools"]["colocated"]["step_kinds"]
    assert schema_problems(summary) == []
    del summary["rounds"][1]["stage_seconds"]
    assert schema_problems(summary)


def test_pools_and_the_load_of_a_measured_run_are_of_the_schema(summary):
    summary["variants"]["a"]["pools"] = describe_pools(counted(AFTER))
    measured = Unloaded((10, 20), 8, 0.1, 0.1, 0.02, 8, 0.01, 0.03, {"prefill": 1})
    summary["load"] = Load(1.0, "measured", "measured", measured).as_summary(PLAN.slos)
    assert schema_problems(summary) == []


@pytest.mark.parametrize(
    "part", [(), ("outcome",), ("variants", "a"), ("rounds", 0), ("winner_map", "cells", 0), ("slo",)]
)
def test_a_field_that_is_not_in_the_schema_or_is_missing_fails(summary, part):
    found = summary
    for name in part:
        found = found[name]
    found["surprise"] = 1
    assert "surprise" in " ".join(schema_problems(summary))
    del found["surprise"]
    assert schema_problems(summary) == []
    del found[next(iter(found))]
    assert schema_problems(summary)
