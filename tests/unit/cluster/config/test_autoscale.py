"""What is refused of `autoscale` before anything starts, with the fix; and that its limits are those of the buckets."""

import pytest

from ridgeline.cluster.config.autoscale import AutoscaleConfig, WorkerBounds
from ridgeline.cluster.config.loader import ConfigError, load_config
from ridgeline.router.observe.metrics import LATENCY_BUCKETS, TOKEN_BUCKETS

ACT = {"autoscale.mode": "act", "autoscale.decode.min_workers": "1", "autoscale.decode.max_workers": "4"}


def problems_of(both_modes=False, **overrides):
    settings = ACT | {key.replace("__", "."): value for key, value in overrides.items()}
    with pytest.raises(ConfigError) as caught:
        load_config(None, settings, both_modes=both_modes)
    return caught.value.problems


def test_by_default_pools_are_left_alone():
    assert load_config().config.autoscale == AutoscaleConfig()
    assert AutoscaleConfig().mode == "none"
    assert AutoscaleConfig().bounds() == {}


def test_a_pool_with_both_bounds_is_changed_within_them_and_the_others_are_left_alone():
    autoscale = load_config(None, ACT).config.autoscale
    assert (autoscale.mode, autoscale.bounds()) == ("act", {"decode": WorkerBounds(1, 4)})


@pytest.mark.parametrize(
    ("path", "value", "fix"),
    [
        ("autoscale.decode.min_workers", "5", "is above autoscale.decode.max_workers (4): swap them"),
        ("autoscale.decode.min_workers", "null", "autoscale.decode.min_workers must be set as well"),
        ("autoscale.decode.max_workers", "null", "autoscale.decode.max_workers must be set as well"),
        ("autoscale.decode.min_workers", "2", "pools.decode.workers (1) is not within"),
        ("pools.decode.workers", "5", "start with a number between them, or change the bounds"),
        ("autoscale.colocated.min_workers", "1", "autoscale.colocated.max_workers must be set as well"),
        ("mode", "colocated", "no pool of mode colocated has bounds: set autoscale.colocated.min_workers"),
        ("autoscale.down_use", "0.8", "must be below autoscale.up_use (0.8)"),
        ("autoscale.down_after_s", "30", "set it to at least 60"),
    ],
)
def test_what_excludes_each_other_is_one_sentence_that_names_the_fix(path, value, fix):
    problems = problems_of(**{path: value})
    assert len(problems) == 1, problems
    assert fix in problems[0]


ADAPTIVE = {"autoscale.adaptive.min_workers": "2", "autoscale.adaptive.max_workers": "8"}
OWN = {"pools.adaptive": "{workers: 9, max_num_seqs: 8, max_num_batched_tokens: 64}"}


def test_pools_of_modes_that_it_may_change_to_may_have_bounds_too():
    autoscale = load_config(None, ACT | ADAPTIVE).config.autoscale
    assert autoscale.bounds() == {"decode": WorkerBounds(1, 4), "adaptive": WorkerBounds(2, 8)}
    sentence = problems_of(**ADAPTIVE, pools__decode__workers="8")[1]
    assert sentence.startswith("pools.prefill.workers and pools.decode.workers (9 together) is not within")
    own = problems_of(**ADAPTIVE, **OWN)[0]
    assert own.startswith("pools.adaptive.workers (9) is not within")


def test_in_a_fixed_mode_bounds_of_another_modes_pool_are_refused():
    [problem] = problems_of(**ADAPTIVE, fixed_mode="true")
    assert "bounds a pool that mode disaggregated does not have, in which fixed_mode keeps it" in problem
    assert "set bounds for prefill or decode instead" in problem


def test_without_any_bounds_there_is_nothing_to_change():
    nothing = {"autoscale.decode.min_workers": "null", "autoscale.decode.max_workers": "null"}
    [problem] = problems_of(**nothing)
    assert "autoscale.mode is act and no pool of mode disaggregated has bounds" in problem
    assert "set autoscale.prefill.min_workers" in problem
    assert "or set autoscale.mode to none" in problem


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("autoscale.mode", "sometimes"),
        ("autoscale.mode", "on"),
        ("autoscale.decode.min_workers", "0"),
        ("autoscale.decode.max_workers", "1001"),
        ("autoscale.interval_s", "0"),
        ("autoscale.ttft_slo_ms", "9"),
        ("autoscale.tpot_slo_ms", "2001"),
    ],
)
def test_a_value_out_of_range_is_named(path, value):
    assert any(path in problem for problem in problems_of(**{path: value}))


def test_a_key_that_does_not_exist_is_answered_with_the_nearest():
    assert "did you mean autoscale.up_use?" in problems_of(autoscale__upuse="1")[0]


def test_bounds_are_not_judged_while_nothing_is_scaled_or_for_a_comparison_which_scales_nothing():
    wrong = ACT | {"autoscale.decode.min_workers": "9"}
    assert load_config(None, wrong | {"autoscale.mode": "none"}).config.autoscale.mode == "none"
    assert load_config(None, wrong, both_modes=True).config.autoscale.mode == "act"


@pytest.mark.parametrize(("path", "buckets"), [("ttft_slo_ms", LATENCY_BUCKETS), ("tpot_slo_ms", TOKEN_BUCKETS)])
def test_limits_lie_within_the_buckets_that_they_are_rounded_to(path, buckets):
    for bound_s in (buckets[0], buckets[-1]):
        assert getattr(AutoscaleConfig.model_validate({path: bound_s * 1000}), path) == bound_s * 1000
    for outside_ms in (buckets[0] * 1000 - 1, buckets[-1] * 1000 + 1):
        with pytest.raises(ValueError, match=path):
            AutoscaleConfig.model_validate({path: outside_ms})
