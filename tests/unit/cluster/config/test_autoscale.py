"""What is refused of `autoscale` before anything starts, with the fix."""

import pytest

from ridgeline.cluster.config.loader import ConfigError, load_config
from ridgeline.router.scheduler.sizing import Bounds

ACT = {"autoscale.mode": "act", "autoscale.decode.min_workers": "1", "autoscale.decode.max_workers": "4"}


ADAPTIVE = {"autoscale.adaptive.min_workers": "2", "autoscale.adaptive.max_workers": "8"}
OWN = {"pools.adaptive": "{workers: 9, max_num_seqs: 8, max_num_batched_tokens: 64}"}
NONE = {"autoscale.decode.min_workers": "null", "autoscale.decode.max_workers": "null"}


@pytest.mark.parametrize(
    ("overrides", "mode", "bounds"),
    [
        pytest.param({}, "none", {}, id="left_alone"),
        pytest.param(ACT, "act", {"decode": Bounds(1, 4)}, id="both_bounds"),
        pytest.param(ACT | ADAPTIVE, "act", {"decode": Bounds(1, 4), "adaptive": Bounds(2, 8)}, id="of_other_modes"),
    ],
)
def test_a_pool_with_both_bounds_is_changed_within_them_and_the_others_are_left_alone(overrides, mode, bounds):
    autoscale = load_config(None, overrides).config.autoscale
    assert (autoscale.mode, autoscale.bounds()) == (mode, bounds)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"autoscale.decode.min_workers": "5"}, ["autoscale.decode.max_workers (4)"]),
        ({"autoscale.decode.min_workers": "null"}, ["autoscale.decode.min_workers must be set"]),
        ({"autoscale.decode.max_workers": "null"}, ["autoscale.decode.max_workers must be set"]),
        ({"autoscale.decode.min_workers": "2"}, ["pools.decode.workers (1)"]),
        ({"pools.decode.workers": "5"}, ["pools.decode.workers (5)"]),
        ({"autoscale.colocated.min_workers": "1"}, ["autoscale.colocated.max_workers must be set"]),
        ({"mode": "colocated"}, ["mode colocated", "set autoscale.colocated.min_workers"]),
        ({"autoscale.goal": "1"}, ["autoscale.goal"]),
        ({"autoscale.up_use": "0.8"}, ["autoscale.up_use is not a setting"]),
        (ADAPTIVE | OWN, ["pools.adaptive.workers (9)"]),
        (ADAPTIVE | {"pools.prefill.workers": "8"}, ["pools.prefill.workers and pools.decode.workers (9 together)"]),
        (ADAPTIVE | {"fixed_mode": "true"}, ["autoscale.adaptive", "fixed_mode", "prefill or decode"]),
        (NONE, ["mode disaggregated", "autoscale.prefill.min_workers", "autoscale.mode to none"]),
        ({"autoscale.mode": "sometimes"}, ["autoscale.mode"]),
        ({"autoscale.mode": "on"}, ["autoscale.mode"]),
        ({"autoscale.decode.min_workers": "0"}, ["autoscale.decode.min_workers"]),
        ({"autoscale.decode.max_workers": "1001"}, ["autoscale.decode.max_workers"]),
        ({"autoscale.interval_s": "0"}, ["autoscale.interval_s"]),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_sentence_that_names_the_setting(overrides, parts):
    with pytest.raises(ConfigError) as caught:
        load_config(None, ACT | overrides)
    [problem] = caught.value.problems
    assert all(part in problem for part in parts), problem


def test_bounds_are_not_judged_while_nothing_is_scaled_or_for_a_comparison_which_scales_nothing():
    wrong = ACT | {"autoscale.decode.min_workers": "9"}
    assert load_config(None, wrong | {"autoscale.mode": "none"}).config.autoscale.mode == "none"
    assert load_config(None, wrong, both_modes=True).config.autoscale.mode == "act"
