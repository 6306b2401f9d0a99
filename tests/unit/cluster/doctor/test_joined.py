"""Places on the machines of a joined cluster; the checks that need a Ray are in tests/components/cluster."""

import dataclasses

import pytest

from ridgeline.cluster.config.loader import load_config
from ridgeline.cluster.doctor.checks import failures, unfit_for
from ridgeline.cluster.doctor.facts import read_host_facts
from ridgeline.cluster.doctor.joined import placed, places
from ridgeline.cluster.ray_nodes import AutoscalerReport

HEAD = {"CPU": 0.0, "ridgeline_router": 1.0}
TWO_CORES = {"CPU": 2.0}
ROUTER = {"router.resources": "{ridgeline_router: 1}"}
GPUS = {f"pools.{pool}.gpus_per_worker": "1" for pool in ("prefill", "decode")}


NOBODY = AutoscalerReport()


def found(machines, settings=(), says=NOBODY):
    return list(places(load_config(None, {"ray.address": "auto", **dict(settings)}).config, machines, says))


@pytest.mark.parametrize(
    ("machines", "settings", "sentences"),
    [
        pytest.param([HEAD, TWO_CORES], ROUTER, [], id="all"),
        pytest.param([TWO_CORES], {}, [], id="one_machine_for_all"),
        pytest.param([HEAD], ROUTER, ["Only the head has joined"] * 2, id="only_the_head"),
        pytest.param([TWO_CORES, TWO_CORES], ROUTER, ["no machine has ridgeline_router"], id="no_place_for_the_router"),
        pytest.param(
            [HEAD, TWO_CORES],
            {"pools.decode.workers": "3"},
            ["2 more places are needed"],
            id="pools_share_the_machines",
        ),
        pytest.param([HEAD, TWO_CORES], {"pools.decode.workers": "2"}, ["1 more place is needed"], id="one_too_few"),
        pytest.param([HEAD, TWO_CORES], GPUS, ["no machine has GPU"] * 2, id="gpus"),
    ],
)
def test_workers_and_the_router_need_a_place_each_on_the_machines_that_have_joined(machines, settings, sentences):
    fixes = failures(found(machines, settings))
    assert len(fixes) == len(sentences)
    assert all(sentence in fix for sentence, fix in zip(sentences, fixes, strict=True)), fixes


EIGHT = {"CPU": 8.0}


@pytest.mark.parametrize(
    ("prefill", "decode", "prefills", "decodes"),
    [
        ((4, 1), (5, 1), [4, 0], [1, 4]),
        ((1, 4), (1, 4), [1, 0], [0, 1]),
        ((2, 4), (1, 8), [1, 1], [0, 0]),
    ],
    ids=["half_full_first", "then_the_emptiest", "what_is_left_over_is_too_small"],
)
def test_workers_fill_half_of_a_machine_and_then_go_where_most_is_free_as_ray_has_it(
    prefill, decode, prefills, decodes
):
    settings = dict(ROUTER)
    for name, (workers, cores) in (("prefill", prefill), ("decode", decode)):
        settings |= {f"pools.{name}.workers": str(workers), f"pools.{name}.cores_per_worker": str(cores)}
    there = placed(load_config(None, {"ray.address": "auto", **settings}).config, [HEAD, EIGHT, EIGHT])
    assert [here["router"] for here in there] == [1, 0, 0]
    assert [here["pools.prefill"] for here in there[1:]] == prefills
    assert [here["pools.decode"] for here in there[1:]] == decodes


def test_a_machine_is_unfit_for_workers_that_only_together_need_more_than_it_has(monkeypatch):
    config = load_config(None, {"ray.address": "auto", "pools.prefill.workers": "4"}).config
    facts = dataclasses.replace(read_host_facts(config), cores=2)
    monkeypatch.setattr("ridgeline.cluster.doctor.checks.read_host_facts", lambda _: facts)
    assert not any("cores" in fix for fix in unfit_for(config, {"prefill": 1}, ["prefill", "decode"]))
    assert any("5 cores are needed and 2" in fix for fix in unfit_for(config, {"prefill": 4, "decode": 1}, []))


def test_machines_that_the_autoscaler_is_to_launch_are_no_failure():
    results = found([HEAD], ROUTER, AutoscalerReport(launches=True))
    assert failures(results) == []
    assert [bool(result.fix) for result in results] == [False, True, True]


def test_a_machine_whose_gpus_its_pod_does_not_see_is_unfit_for_pools_with_gpus_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    config = load_config(None, {"ray.address": "auto", **GPUS}).config
    assert any("GPUs cannot be used" in fix for fix in unfit_for(config, {}, ["prefill"]))
    assert unfit_for(config, {}, []) == []
