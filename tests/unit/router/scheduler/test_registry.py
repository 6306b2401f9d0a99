"""Policies are found by name: those of Ridgeline, divisions of the fleet, and those of installed packages."""

from importlib import metadata

import pytest

from ridgeline.router.scheduler import policies
from ridgeline.router.scheduler.policies import (
    Colocated,
    Disaggregated,
    Slack,
    Threshold,
    division_name,
    make_policy,
    policy_names,
)
from ridgeline.router.settings import PolicyConfig
from tests.unit.router.scheduler.samples import fleet, poisson


class WithoutPaced:
    def assign(self, request, workers):
        return None


@pytest.fixture
def installed(monkeypatch):
    """Entry points as installed packages have them."""

    def install(**entries):
        found = metadata.EntryPoints(
            metadata.EntryPoint(name, value, policies.GROUP) for name, value in entries.items()
        )
        monkeypatch.setattr(policies, "entry_points", lambda **wanted: found.select(**wanted))

    return install


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("colocated", {}, Colocated),
        ("colocated, paced", {}, Colocated),
        ("disaggregated", {"prefill_part": 0.5}, Disaggregated),
        ("threshold", {"prefill_part": 0.5, "split_above_tokens": 256}, Threshold),
        ("3 of 8 for prefill", {}, Disaggregated),
        ("3 of 8 for prefill, slack", {}, Slack),
    ],
)
def test_a_policy_is_made_by_its_name(name, options, kind):
    made = make_policy(name, options)
    assert type(made) is kind
    if name.startswith("3 of 8"):
        assert made.shape.prefill_workers(8) == 3
        assert division_name(3, 8, slack=kind is Slack) == name


def test_an_installed_policy_is_found_by_its_entry_point(installed):
    installed(mine="ridgeline.router.scheduler.policies:Threshold")
    assert "mine" in policy_names()
    assert make_policy("mine", {"split_above_tokens": 9, "prefill_part": 0.5}).split_above_tokens == 9


@pytest.mark.parametrize(
    ("entries", "name", "options", "says"),
    [
        ({}, "fastest", {}, "no policy 'fastest' here: choose adaptive or one of colocated, "),
        ({}, "colocated", {"speed": 2}, "speed"),
        ({"gone": "no.such.module:Policy"}, "gone", {}, "cannot be imported"),
        ({"gone": "ridgeline.router.scheduler.policies:Gone"}, "gone", {}, "cannot be imported"),
        ({"half": f"{__name__}:WithoutPaced"}, "half", {}, "no `paced`"),
    ],
)
def test_a_policy_that_cannot_be_made_says_why(installed, entries, name, options, says):
    installed(**entries)
    with pytest.raises(ValueError, match=says):
        make_policy(name, options)
    with pytest.raises(ValueError, match=says):
        PolicyConfig(name=name, options=options)


def test_adaptive_has_no_options():
    with pytest.raises(ValueError, match="remove speed"):
        PolicyConfig(options={"speed": 1})


def test_threshold_splits_what_is_longer_than_its_number():
    workers = fleet(2)
    policy = make_policy("threshold", {"split_above_tokens": 200})
    (long,), (short,) = poisson(1, 1), poisson(1, 1, prompt_tokens=200)
    assert policy.assign(long.features(0.0), workers).splits
    whole = policy.assign(short.features(0.0), workers)
    assert (whole.prompt_worker, whole.decode_worker) == ("w1", "w1")
