"""Why a worker has no place: what each of Ray's machines lacks, and what the autoscaler says."""

from datetime import datetime

import pytest

from ridgeline.cluster.ray_nodes import (
    LATEST_REASONS,
    LOG_TAIL_BYTES,
    AutoscalerReport,
    fits,
    latest_reasons,
    why_no_place,
)

ONE_GPU = {"CPU": 8.0, "GPU": 1.0, "node:10.0.0.2": 1.0}
TWO_GPUS = {"CPU": 16.0, "GPU": 2.0, "ridgeline_decode": 2.0}
HEAD = {"CPU": 0.0, "ridgeline_router": 1.0}


@pytest.mark.parametrize(
    ("takes", "machines", "parts"),
    [
        pytest.param({"CPU": 8, "GPU": 1}, [HEAD, ONE_GPU], [], id="fits"),
        pytest.param({}, [HEAD], [], id="takes_nothing"),
        pytest.param({"CPU": 8}, [], ["no machine has CPU"], id="no_machine"),
        pytest.param({"CPU": 8}, [HEAD], ["no machine has CPU"], id="only_the_head"),
        # The ranks of one engine share a machine, however many GPUs all machines have together.
        pytest.param(
            {"CPU": 8, "GPU": 4},
            [ONE_GPU, TWO_GPUS],
            ["takes 4 GPU", "has 2", "pools.decode.gpus_per_worker"],
            id="ranks",
        ),
        pytest.param({"CPU": 32}, [ONE_GPU, TWO_GPUS], ["has 16", "pools.decode.cores_per_worker"], id="cores"),
        pytest.param(
            {"ridgeline_prefill": 1},
            [TWO_GPUS],
            ["""--resources='{"ridgeline_prefill": 1}'"""],
            id="resource_of_nobody",
        ),
        pytest.param({"ridgeline_decode": 3}, [TWO_GPUS], ["has 2", "pools.decode.resources"], id="too_few_of_it"),
        pytest.param({"ridgeline_router": 1, "CPU": 1}, [HEAD, ONE_GPU], ["all that one worker takes"], id="apart"),
    ],
)
def test_what_no_machine_has_is_named_with_the_setting_that_asks_for_it(takes, machines, parts):
    why = why_no_place(takes, "pools.decode", machines)
    assert bool(why) == bool(parts) == (not any(fits(takes, machine) for machine in machines))
    assert all(part in why for part in parts), why


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (AutoscalerReport(), ""),
        (AutoscalerReport(launches=True), ""),
        (AutoscalerReport(True, ["decode, 1 launching"]), "Ray's autoscaler has under way: decode, 1 launching"),
        (
            AutoscalerReport(True, ["a"], ["b: Capacity", "c"]),
            "Ray's autoscaler has under way: a; Ray's autoscaler failed: b: Capacity, c",
        ),
    ],
)
def test_whoever_waits_is_told_of_machines_under_way_and_of_failures_alone(says, told):
    assert str(says) == told


NOW = datetime.fromisoformat("2026-11-29 15:34:00").astimezone()
LAUNCH = "2026-11-29 15:33:46,120\tINFO node_provider.py:491 -- Failed to launch 1 nodes of type decode: no capacity"
SET_UP = (
    "2026-11-29 15:33:47,120\tINFO threaded_ray_installer.py:81 -- Ray installation failed on instance i-07: "
    "Ray installation failed with unexpected status: update-failed"
)
NO_TYPE = (
    "2026-11-29 15:33:49,120\tINFO monitor.py:438 -- :event_summary:Error: No available node types can fulfill "
    "resource request {'ridgeline_prefil': 1.0, 'CPU': 1.0}. Add suitable node types."
)
FINE = "2026-11-29 15:33:48,120\tINFO node_provider.py:489 -- Launched 1 nodes of type decode."


@pytest.mark.parametrize(
    ("lines", "reasons"),
    [
        ([FINE], []),
        ([LAUNCH, FINE, LAUNCH], ["Failed to launch 1 nodes of type decode: no capacity"]),
        ([LAUNCH, SET_UP], [SET_UP.partition(" -- ")[2], LAUNCH.partition(" -- ")[2]]),
        ([LAUNCH, *[FINE] * (LOG_TAIL_BYTES // len(FINE) + 1)], []),
        ([LAUNCH.replace("decode", each) for each in "abcde"], [f"type {each}: no capacity" for each in "edc"]),
        ([NO_TYPE, FINE], [NO_TYPE.partition("Error: ")[2]]),
        ([LAUNCH.replace("15:33", "15:31"), SET_UP], [SET_UP.partition(" -- ")[2]]),
    ],
    ids=["fine", "again and again", "set-up", "far above", "many", "no type", "a while ago"],
)
def test_the_latest_reasons_why_machines_did_not_come_are_in_the_autoscalers_log(tmp_path, lines, reasons):
    log = tmp_path / "monitor.log"
    assert latest_reasons(log, NOW) == [], "on another machine than the head"
    log.write_text("\n".join(lines))
    found = latest_reasons(log, NOW)
    assert len(found) == len(reasons) <= LATEST_REASONS
    assert all(one.endswith(reason) for one, reason in zip(found, reasons, strict=True)), found
