"""summary.schema.json, against summaries that have every optional part, and against what is not in it."""

from __future__ import annotations

import copy
import dataclasses
from datetime import UTC, datetime, timedelta

import pytest

from ridgeline.loadtest.report.pools import describe_pools
from ridgeline.loadtest.report.rounds import Interruption, interruptions_summary, round_summary
from ridgeline.loadtest.report.summary import SCHEMA
from ridgeline.loadtest.run.calibration import Load
from ridgeline.loadtest.run.client.process import ClientLoad
from ridgeline.loadtest.run.unloaded import Unloaded
from tests.support.summary_schema import SCHEMA_FILE, VALIDATOR, schema_problems
from tests.unit.loadtest.report.test_comparison import CORES, PLAN, a_round, comparison_summary, replayed
from tests.unit.loadtest.report.test_summary import AFTER, STEPS, counted


@pytest.fixture(scope="module")
def whole_summary():
    return comparison_summary(a=CORES)


@pytest.fixture
def summary(whole_summary):
    return copy.deepcopy(whole_summary)


def test_the_schema_is_valid_and_its_id_is_the_one_that_summaries_name(summary):
    VALIDATOR.check_schema(VALIDATOR.schema)
    assert VALIDATOR.schema["$id"] == summary["schema"] == SCHEMA
    assert SCHEMA_FILE.read_text().endswith("\n")


def test_a_comparison_with_all_that_may_be_known_of_it_is_of_the_schema(summary):
    assert schema_problems(summary) == []
    later = datetime.now(UTC)
    summary["interruptions"] = interruptions_summary([Interruption(later, later + timedelta(seconds=3))])
    summary["variants"]["a"]["pools"] = describe_pools(counted(AFTER))
    measured = Unloaded((10, 20), 8, 0.1, 0.1, 0.02, 8, 0.01, 0.03, {"prefill": 1})
    summary["load"] = Load(1.0, "measured", "measured", measured).as_summary(PLAN.slos)
    assert schema_problems(summary) == []


def test_rounds_with_all_figures_and_with_none_are_of_the_schema(summary):
    client = ClientLoad(1.0, 0.1, 0.1, 0.2, 0.3, 10.0, 0, (0, 1), 0)
    whole = dataclasses.replace(replayed(0.1, 0.04), deltas={"http://here": counted(AFTER + STEPS)}, client=client)
    lost, kept = a_round("a", 0, None, "a worker restarted", is_kept=False), a_round("f", 0, whole)
    summary["rounds"] = [round_summary(each, 2.0, "colocated", PLAN.slos) for each in (lost, kept)]
    assert summary["rounds"][1]["pools"]["colocated"]["step_kinds"]
    assert schema_problems(summary) == []
    del summary["rounds"][1]["stage_seconds"]
    assert schema_problems(summary)


@pytest.mark.parametrize(
    "part",
    [
        (),
        ("verdict",),
        ("verdict", "ratios", 0),
        ("variants", "a"),
        ("variants", "a", "per_device"),
        ("rounds", 0),
        ("map", "cells", 0),
        ("slo",),
    ],
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
