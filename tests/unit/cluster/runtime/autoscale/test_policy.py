"""When a pool gets a worker more or one fewer, and when not: tables of readings in a time that is made up."""

import random

import pytest

from ridgeline.cluster.config.autoscale import AutoscaleConfig
from ridgeline.cluster.runtime.autoscale.policy import Memory, Reading, decide
from ridgeline.router.observe.fleet_use import FleetUse, WorkerUse
from ridgeline.router.observe.metrics import Within

EVERY_S = 15.0


def settings(**changes):
    """Up from 80 % after 60 s, down from 30 % after 600 s, 180 s of cooldown: the defaults."""
    bounds = {"min_workers": 1, "max_workers": 4}
    return AutoscaleConfig.model_validate(
        {"mode": "act", "prefill": bounds, "decode": bounds, "colocated": bounds, **changes}
    )


def a_fleet_use(waiting=None, prompt_steps_s=0.0, lost=(), blocks=0.0, **pools):
    """Workers of each pool: how many, and which fraction of their places is taken.

    `prompt_steps_s` is what every engine has spent in steps with prompts; `blocks` the fraction of KV blocks in use.
    """
    workers = []
    for pool, (number, taken) in pools.items():
        for _ in range(number):
            name = f"worker-{len(workers)}"
            workers.append(
                WorkerUse(
                    worker_id=name,
                    incarnation="1",
                    pool=pool,
                    usable=name not in lost,
                    prompt_steps_s=prompt_steps_s,
                    running=round(taken * 100),
                    places=100,
                    kv_blocks_used=round(blocks * 1000),
                    kv_blocks=1000,
                )
            )
    return FleetUse(tuple(workers), waiting or {})


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


def fleet(**pools):
    return pools


FULL, THREE = fleet(decode=(2, 0.9)), fleet(decode=(3, 0.9))
BOTH = fleet(prompts=0.85, prefill=(1, 0.0), decode=(1, 0.95))
SPLIT = fleet(prompts=0.5, prefill=(1, 0.0), decode=(1, 0.5))
TWO_TO_FOUR = {"min_workers": 2, "max_workers": 4}
NONE = {"min_workers": None, "max_workers": None}


def case(name, changes, *steps, **settings):
    """What is changed (when, which pool, from, to) while the fleet is so for so many seconds, then so."""
    return pytest.param(settings, steps, changes, id=name)


@pytest.mark.parametrize(
    ("settings", "steps", "changes"),
    [
        # growth
        case("full_not_long_enough", [], (60, FULL)),
        case("full_for_long_enough", [(60.0, "decode", 2, 3)], (75, FULL)),
        case("a_peak_that_ends", [], (60, FULL), (15, fleet(decode=(2, 0.7))), (60, FULL)),
        case("full_anew", [(135.0, "decode", 2, 3)], (60, FULL), (15, fleet(decode=(2, 0.7))), (75, FULL)),
        case(
            "the_fuller_one_first",
            [(60.0, "decode", 1, 2), (255.0, "prefill", 1, 2)],
            (75, BOTH),
            (195, BOTH | fleet(decode=(2, 0.5))),
        ),
        # shrinking
        case("idle_not_long_enough", [], (600, fleet(decode=(3, 0.1)))),
        case("idle_for_long_enough", [(600.0, "decode", 3, 2)], (615, fleet(decode=(3, 0.1)))),
        *(
            case(f"what_is_left_at_{taken}", changes, (900, fleet(decode=(2, taken))), down_use=0.5)
            for changes, each in (([(600.0, "decode", 2, 1)], (0.3, 0.38)), ([], (0.4, 0.45)))
            for taken in each
        ),
        case(
            "the_emptier_one_first",
            [(600.0, "decode", 2, 1)],
            (660, fleet(prompts=0.25, prefill=(2, 0.0), decode=(2, 0.05))),
        ),
        case(
            "growth_before_shrinking",
            [(600.0, "decode", 1, 2)],
            (660, fleet(prefill=(3, 0.0), decode=(1, 0.9))),
            up_after_s=600,
        ),
        # nothing
        case("prompts_wait", [], (3600, fleet(prefill=(2, 0.0), prompts=0.1, waiting={"prefill": 1}))),
        case("at_the_bounds", [], (3600, fleet(prefill=(2, 0.0), decode=(4, 1.0))), prefill=TWO_TO_FOUR),
        case("at_the_last_worker", [], (3600, fleet(decode=(1, 0.0)))),
        case("without_bounds", [], (3600, fleet(decode=(2, 1.0))), decode=NONE),
        case("a_worker_is_lost", [], (3600, fleet(decode=(2, 0.9), lost=("worker-1",)))),
        case("an_idle_pool_misses_its_limit", [], (3600, fleet(decode=(2, 0.2), within=counts(tpot=(0, 100))))),
        case("too_few_missed_a_limit", [], (3600, fleet(decode=(1, 0.5), within=counts(tpot=(0, 9))))),
        case(
            "beyond_its_bounds", [], (1200, fleet(decode=(6, 0.9))), (1200, fleet(decode=(1, 0.1))), decode=TWO_TO_FOUR
        ),
        # cooldown
        case("a_change_by_anybody", [(240.0, "decode", 3, 4)], (60, FULL), (195, THREE)),
        case("an_operation", [(765.0, "decode", 2, 3)], (600, FULL | fleet(under_way=True)), (300, FULL)),
        case("its_own_decision", [(at_s, "decode", 2, 3) for at_s in (60.0, 240.0, 420.0)], (600, FULL)),
        # what limits a pool
        case("places", [(60.0, "decode", 1, 2)], (120, fleet(decode=(1, 0.8)))),
        case("not_enough_places", [], (120, fleet(decode=(1, 0.79)))),
        case("blocks", [(60.0, "decode", 1, 2)], (120, fleet(decode=(1, 0.1), blocks=0.85))),
        case("time_of_prompts", [(75.0, "prefill", 1, 2)], (120, fleet(prefill=(1, 0.0), prompts=0.85))),
        case("waiting_for_prefill", [], (120, fleet(prefill=(1, 0.0), prompts=0.5, waiting={"prefill": 9}))),
        case("places_of_prefill", [], (120, fleet(prefill=(1, 0.99), prompts=0.5))),
        case("places_of_colocated", [(60.0, "colocated", 1, 2)], (120, fleet(colocated=(1, 0.85)))),
        case("prompts_of_colocated", [], (120, fleet(colocated=(1, 0.4), prompts=0.99))),
        case("waits", [(60.0, "colocated", 1, 2)], (120, fleet(colocated=(1, 0.4), waiting={"colocated": 1}))),
        case("blocks_of_colocated", [(60.0, "colocated", 1, 2)], (120, fleet(colocated=(1, 0.1), blocks=0.9))),
        # limits of latencies
        case("ttft", [(75.0, "prefill", 1, 2)], (90, SPLIT | fleet(within=counts(ttft=(50, 100))))),
        case("tpot", [(75.0, "decode", 1, 2)], (90, SPLIT | fleet(within=counts(tpot=(50, 100))))),
        case("limits_that_are_kept", [], (90, SPLIT | fleet(within=counts(ttft=(95, 100), tpot=(91, 100))))),
        *(
            case(
                f"{latency}_of_colocated",
                [(75.0, "colocated", 1, 2)],
                (90, fleet(within=counts(**{latency: (50, 100)}), colocated=(1, 0.5))),
            )
            for latency in ("ttft", "tpot")
        ),
    ],
)
def test_what_is_changed(settings, steps, changes):
    story = Story(**settings)
    for for_s, there in steps:
        story.go_on(for_s, **there)
    assert story.changes == changes


@pytest.mark.parametrize(
    ("settings", "for_s", "there", "parts"),
    [
        ({}, 75, FULL | fleet(waiting={"decode": 4}), ["from 2 to 3", "60 s", "90% of its places", "4 waiting", "80%"]),
        ({}, 615, fleet(decode=(3, 0.1)), ["from 3 to 2", "would be 15%"]),
        (
            {"up_after_s": 0},
            30,
            fleet(within=counts(tpot=(50, 100)), decode=(1, 0.5)),
            ["50% of 100 sequences", "1000 ms", "90%", "50% of its places"],
        ),
    ],
)
def test_the_sentence_has_the_numbers_that_led_to_the_decision(settings, for_s, there, parts):
    story = Story(**settings)
    story.go_on(for_s, **there)
    assert all(part in story.decisions[0][1].sentence for part in parts)


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


def test_an_operation_that_hides_the_fleet_counts_too():
    story = Story(up_after_s=0)
    story.read(FleetUse(), under_way=True)
    story.go_on(165, decode=(2, 0.9))
    assert story.changes == []
    assert story.go_on(15, decode=(2, 0.9)) == [(180.0, "decode", 2, 3)]


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
