"""When a pool gets a worker more or one fewer, and when not: tables of readings in a time that is made up."""

import random

import pytest

from ridgeline.cluster.config.autoscale import AutoscaleConfig
from ridgeline.cluster.runtime.autoscale.policy import Memory, Reading, decide
from ridgeline.router.observe.fleet_use import FleetUse
from ridgeline.router.observe.metrics import Within
from tests.unit.cluster.runtime.autoscale.uses import a_fleet_use

EVERY_S = 15.0


def settings(**changes):
    """Up from 80 % after 60 s, down from 30 % after 600 s, 180 s of cooldown: the defaults."""
    bounds = {"min_workers": 1, "max_workers": 4}
    return AutoscaleConfig.model_validate(
        {"mode": "act", "prefill": bounds, "decode": bounds, "colocated": bounds, **changes}
    )


class Story:
    """Readings one after the other; collects the decisions with their time."""

    def __init__(self, **changes):
        self.settings, self.memory = settings(**changes), Memory()
        self.now_s, self.prompt_steps_s = 0.0, 0.0
        self.decisions = []

    def read(self, fleet, within=None, under_way=False):
        reading = Reading(self.now_s, fleet, within or {}, under_way)
        decision, self.memory = decide(self.settings, reading, self.memory)
        self.now_s += EVERY_S
        if decision is not None:
            self.decisions.append((reading.at_s, decision))
        return decision

    def go_on(self, for_s, prompts=0.0, within=None, under_way=False, **fleet):
        """Read the same for a time; `prompts` is the fraction of it that engines spend in steps with prompts."""
        for _ in range(round(for_s / EVERY_S)):
            self.prompt_steps_s += prompts * EVERY_S
            use = a_fleet_use(prompt_steps_s=self.prompt_steps_s, **fleet)
            self.read(use, within() if callable(within) else within, under_way)
        return self.changes

    @property
    def changes(self):
        return [(at_s, one.pool, one.now_workers, one.wanted_workers) for at_s, one in self.decisions]


def counts(router="router", **numbers):
    """Latencies of a router, growing by (kept, counted) at each reading."""
    total = {name: [0, 0] for name in numbers}

    def more():
        for name, (kept, counted) in numbers.items():
            total[name][0] += kept
            total[name][1] += counted
        return {router: {name: Within(1.0, *each) for name, each in total.items()}}

    return more


# Growth


def test_a_full_pool_grows_once_it_has_been_full_for_long_enough_and_not_before():
    story = Story()
    assert story.go_on(60, decode=(2, 0.9)) == []
    assert story.go_on(15, decode=(2, 0.9)) == [(60.0, "decode", 2, 3)]


def test_a_peak_that_ends_begins_the_time_anew():
    story = Story()
    story.go_on(60, decode=(2, 0.9))
    story.go_on(15, decode=(2, 0.7))
    assert story.go_on(60, decode=(2, 0.9)) == []
    assert story.go_on(15, decode=(2, 0.9)) == [(135.0, "decode", 2, 3)]


@pytest.mark.parametrize(
    ("fleet", "grows"),
    [
        ({"decode": (1, 0.8)}, "decode"),
        ({"decode": (1, 0.79)}, None),
        ({"decode": (1, 0.1), "blocks": 0.85}, "decode"),
        ({"prefill": (1, 0.0), "prompts": 0.85}, "prefill"),
        ({"prefill": (1, 0.0), "prompts": 0.5, "waiting": {"prefill": 9}}, None),
        ({"prefill": (1, 0.99), "prompts": 0.5}, None),
        ({"colocated": (1, 0.85)}, "colocated"),
        ({"colocated": (1, 0.4), "prompts": 0.99}, None),
        ({"colocated": (1, 0.4), "waiting": {"colocated": 1}}, "colocated"),
        ({"colocated": (1, 0.1), "blocks": 0.9}, "colocated"),
    ],
)
def test_each_pool_is_judged_by_what_limits_it(fleet, grows):
    story = Story()
    story.go_on(120, **fleet)
    assert [one.pool for _, one in story.decisions] == ([grows] if grows else [])


def test_the_sentence_has_the_numbers_that_led_to_the_decision():
    story = Story()
    story.go_on(75, decode=(2, 0.9), waiting={"decode": 4})
    assert story.decisions[0][1].sentence == (
        "decode from 2 to 3 workers: it has needed more for 60 s; now 90% of its places are taken, 4 waiting prompts "
        "(autoscale.up_use is 80%)"
    )


def test_of_two_full_pools_the_fuller_one_grows_and_the_other_after_the_cooldown():
    story = Story()
    story.go_on(75, prompts=0.85, prefill=(1, 0.0), decode=(1, 0.95))
    assert story.changes == [(60.0, "decode", 1, 2)]
    story.go_on(195, prompts=0.85, prefill=(1, 0.0), decode=(2, 0.5))
    assert story.changes[1:] == [(255.0, "prefill", 1, 2)]


# Shrinking


def test_an_idle_pool_loses_a_worker_after_a_longer_time():
    story = Story()
    assert story.go_on(600, decode=(3, 0.1)) == []
    assert story.go_on(15, decode=(3, 0.1)) == [(600.0, "decode", 3, 2)]
    assert "with one fewer it would be 15%" in story.decisions[0][1].reason


@pytest.mark.parametrize(("taken", "shrinks"), [(0.3, True), (0.38, True), (0.4, False), (0.45, False)])
def test_a_pool_shrinks_only_if_what_is_left_would_still_be_below_the_upper_threshold(taken, shrinks):
    story = Story(down_use=0.5)
    assert bool(story.go_on(900, decode=(2, taken))) == shrinks


@pytest.mark.parametrize(
    ("changes", "fleet"),
    [
        ({}, {"prefill": (2, 0.0), "prompts": 0.1, "waiting": {"prefill": 1}}),
        ({"prefill": {"min_workers": 2, "max_workers": 4}}, {"prefill": (2, 0.0), "decode": (4, 1.0)}),
        ({}, {"decode": (1, 0.0)}),
        ({"decode": {"min_workers": None, "max_workers": None}}, {"decode": (2, 1.0)}),
        ({}, {"decode": (2, 0.9), "lost": ("worker-1",)}),
        ({}, {"decode": (2, 0.2), "within": counts(tpot=(0, 100))}),
        ({}, {"decode": (1, 0.5), "within": counts(tpot=(0, 9))}),
    ],
    ids=[
        "while_prompts_wait_for_the_pool_that_could_shrink",
        "at_the_least_and_the_most_workers",
        "at_the_last_worker",
        "without_bounds",
        "while_a_worker_of_it_is_lost",
        "where_an_idle_pool_misses_its_limit",
        "where_too_few_sequences_missed_a_limit",
    ],
)
def test_a_pool_stays_as_it_is(changes, fleet):
    assert Story(**changes).go_on(3600, **fleet) == []


def test_of_two_idle_pools_the_emptier_one_shrinks():
    story = Story()
    story.go_on(660, prompts=0.25, prefill=(2, 0.0), decode=(2, 0.05))
    assert [one.pool for _, one in story.decisions] == ["decode"]


def test_growth_goes_before_shrinking():
    story = Story(up_after_s=600)
    story.go_on(660, prompts=0.0, prefill=(3, 0.0), decode=(1, 0.9))
    assert [(one.pool, one.wanted_workers) for _, one in story.decisions] == [("decode", 2)]


# What keeps it from changing its mind


def test_a_load_between_the_thresholds_changes_nothing_however_it_varies():
    story, chance = Story(), random.Random(7)
    for _ in range(2000):
        story.go_on(
            EVERY_S, prompts=chance.uniform(0.31, 0.79), prefill=(2, 0.0), decode=(2, chance.uniform(0.31, 0.79))
        )
    assert story.decisions == []


@pytest.mark.parametrize("load", [0.05, 0.2, 0.5, 0.85, 1.0, 1.7, 2.4, 3.1, 5.0])
def test_under_any_steady_load_the_number_of_workers_settles(load):
    """`load` in workers that are full."""
    story, workers = Story(), 2
    for _ in range(1000):
        decision = story.read(a_fleet_use(decode=(workers, min(1.0, load / workers))))
        if decision is not None:
            assert decision.now_workers == workers
            workers = decision.wanted_workers
    steps = [wanted - now for _, _, now, wanted in story.changes]
    assert len({*steps}) <= 1, "up and down again"
    assert story.now_s - (story.changes[-1][0] if steps else 0) > 10_000


def test_a_change_of_any_number_by_anybody_begins_a_cooldown():
    story = Story()
    story.go_on(60, decode=(2, 0.9))
    story.go_on(180, decode=(3, 0.9))  # an operator's
    assert story.changes == []
    assert story.go_on(15, decode=(3, 0.9)) == [(240.0, "decode", 3, 4)]


def test_nothing_is_decided_while_an_operation_is_under_way_and_for_a_while_after():
    story = Story()
    story.go_on(600, decode=(2, 0.9), under_way=True)
    assert story.changes == []
    story.go_on(300, decode=(2, 0.9))
    assert story.changes == [(765.0, "decode", 2, 3)], "180 s after the last reading with an operation"


def test_an_operation_that_hides_the_fleet_counts_too():
    story = Story(up_after_s=0)
    story.read(FleetUse(), under_way=True)
    story.go_on(165, decode=(2, 0.9))
    assert story.changes == []
    assert story.go_on(15, decode=(2, 0.9)) == [(180.0, "decode", 2, 3)]


def test_its_own_decision_begins_a_cooldown_even_if_nothing_came_of_it():
    story = Story()
    story.go_on(600, decode=(2, 0.9))
    assert [at_s for at_s, *_ in story.changes] == [60.0, 240.0, 420.0]


# Bounds


def test_a_pool_that_an_operator_took_beyond_its_bounds_is_not_forced_back():
    story = Story(decode={"min_workers": 2, "max_workers": 4})
    assert story.go_on(1200, decode=(6, 0.9)) == []
    assert story.go_on(1200, decode=(1, 0.1)) == []


# Readings that say little


def test_nothing_is_decided_on_an_empty_reading_and_the_time_begins_anew_after_it():
    story = Story()
    story.go_on(60, decode=(2, 0.9))
    assert story.read(FleetUse()) is None
    assert story.go_on(60, decode=(2, 0.9)) == []
    assert len(story.go_on(15, decode=(2, 0.9))) == 1


def test_prefill_is_not_judged_by_workers_that_were_not_there_before():
    story = Story(up_after_s=0)
    story.read(a_fleet_use(prefill=(1, 0.0), prompt_steps_s=1000.0))
    assert story.decisions == [], "what it has done since its start says nothing of now"
    story.read(a_fleet_use(prefill=(1, 0.0), prompt_steps_s=1001.0))
    assert story.decisions == []
    story.read(a_fleet_use(prefill=(1, 0.0), prompt_steps_s=1015.0))
    assert story.changes == [(30.0, "prefill", 1, 2)]


# Limits of latencies


@pytest.mark.parametrize(
    ("missed", "grows"),
    [({"ttft": (50, 100)}, "prefill"), ({"tpot": (50, 100)}, "decode"), ({"ttft": (95, 100), "tpot": (91, 100)}, None)],
)
def test_a_limit_that_is_missed_makes_the_pool_grow_that_it_depends_on(missed, grows):
    story = Story()
    story.go_on(90, prompts=0.5, within=counts(**missed), prefill=(1, 0.0), decode=(1, 0.5))
    assert [one.pool for _, one in story.decisions] == ([grows] if grows else [])


@pytest.mark.parametrize("latency", ["ttft", "tpot"])
def test_in_mode_colocated_either_limit_makes_its_pool_grow(latency):
    story = Story()
    story.go_on(90, within=counts(**{latency: (50, 100)}), colocated=(1, 0.5))
    assert [one.pool for _, one in story.decisions] == ["colocated"]


def test_the_sentence_about_a_missed_limit_says_by_how_much():
    story = Story(up_after_s=0)
    story.go_on(30, within=counts(tpot=(50, 100)), decode=(1, 0.5))
    assert story.decisions[0][1].reason == (
        "it has needed more for 0 s; now 50% of 100 sequences took at most 1000 ms per token (autoscale.min_attainment "
        "is 90%), 50% of its places are taken"
    )


def test_a_router_that_was_started_again_is_not_counted_until_the_next_reading():
    story = Story(up_after_s=0)
    fleet = a_fleet_use(decode=(1, 0.5))
    for kept, counted in ((900, 1000), (1000, 1100), (0, 50), (50, 100)):
        story.read(fleet, {"router": {"tpot": Within(0.05, kept, counted)}})
    assert story.decisions == []
    story.read(fleet, {"router": {"tpot": Within(0.05, 50, 150)}})
    assert story.changes == [(60.0, "decode", 1, 2)]


def test_what_several_routers_counted_is_added_up():
    story = Story(up_after_s=0)
    fleet = a_fleet_use(decode=(1, 0.5))
    for each in (0, 8):
        story.read(fleet, {name: {"tpot": Within(0.05, 0, each)} for name in ("router-0", "router-1")})
    assert "0% of 16 sequences took at most 50 ms per token" in story.decisions[0][1].reason
