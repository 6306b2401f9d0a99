"""How many workers are wanted for the latest requests: tables of loads, and whole days at one decision a minute."""

import math
import random
from itertools import pairwise

import pytest

from ridgeline.router.scheduler.engines import modelled
from ridgeline.router.scheduler.offline_simulation import Served
from ridgeline.router.scheduler.policies import Colocated
from ridgeline.router.scheduler.simulation import Simulation
from ridgeline.router.scheduler.sizing import Bounds, LatestLoad, wanted
from tests.support.simulated_serving import BF16, fleet_model
from tests.unit.router.scheduler.samples import poisson

MINUTE_S, WINDOW_S = 60.0, 600.0
BARELY_S = 1.1 * BF16.decode_s(1, 100)
"""A TPOT that an idle worker keeps, and one whose steps take 20 % longer does not."""
LONG_PROMPTS, MIXED, LONG_ANSWERS = (512, 4), (512, 64), (32, 128)


def requests(per_s, lengths=LONG_PROMPTS, slos=(3.0, 0.1), for_s=WINDOW_S, begin_s=0.0):
    draw, now_s, made = random.Random(1), begin_s, []
    while per_s and (now_s := now_s + draw.expovariate(per_s)) < begin_s + for_s:
        made.append(Served(now_s, *lengths, *slos, None, None))
    return tuple(made)


def load_of(sizes, those, **known):
    """Workers with a core each of a Zen 4 CPU; `those` came in ten minutes."""
    pools = tuple(pool for pool, number in sizes.items() for _ in range(number))
    mode = "disaggregated" if "prefill" in sizes else pools[0]
    return LatestLoad(
        **({"mode": mode, "pools": pools, "fleet": fleet_model(len(pools)), "is_whole": True} | known), requests=those
    )


def found(sizes, those, most=4, bounded=("prefill", "decode", "colocated", "adaptive"), **known):
    search = wanted(load_of(sizes, those, **known), sizes, dict.fromkeys(bounded, Bounds(1, most)), 0.95)
    while True:
        try:
            next(search)
        except StopIteration as end:
            return end.value


ONE_AND_ONE, QUEUE = {"prefill": 1, "decode": 1}, {"waiting_prompts": 120, "waiting_tokens": 120 * 512}


@pytest.mark.parametrize(
    ("sizes", "those", "known", "change"),
    [
        pytest.param(ONE_AND_ONE, requests(0.4), {}, None, id="four_tenths_busy"),
        # dynamo#10528: by its use the pool looks fine, and what waits makes all that comes late
        pytest.param(ONE_AND_ONE, requests(0.4), QUEUE, ("prefill", 1), id="four_tenths_busy_with_a_queue"),
        pytest.param(ONE_AND_ONE, requests(2.0), {}, ("prefill", 1), id="more_prompts_than_one_computes"),
        pytest.param(ONE_AND_ONE, requests(1.5, LONG_ANSWERS), {}, ("decode", 1), id="longer_answers"),
        pytest.param({"colocated": 1}, requests(1.5), {}, ("colocated", 1), id="too_few_replicas"),
        pytest.param({"adaptive": 2}, requests(3.0, for_s=60), {}, ("adaptive", 1), id="too_few_adaptive_ones"),
        pytest.param({"colocated": 1}, requests(6.0), {}, ("colocated", 1), id="far_too_few"),
        pytest.param({"colocated": 4}, requests(6.0), {}, None, id="at_the_upper_bound"),
        pytest.param(ONE_AND_ONE, requests(2.0), {"bounded": ["decode"]}, None, id="another_pool_would_not_help"),
        pytest.param({"colocated": 1}, requests(1.5, for_s=10), {}, None, id="too_few_requests_to_judge_by"),
        pytest.param({"colocated": 3}, requests(0.3, MIXED), {}, ("colocated", -1), id="too_many"),
        pytest.param({"prefill": 3, "decode": 2}, requests(0.3), {}, ("decode", -1), id="the_pool_that_needs_it_least"),
        pytest.param({"adaptive": 3}, requests(0.2), {"policy": ("colocated", {})}, ("adaptive", -1), id="own_policy"),
        pytest.param({"adaptive": 3}, requests(0.2), {"may_divide": False}, ("adaptive", -1), id="undivided"),
        pytest.param({"colocated": 3}, requests(0.3), {"is_whole": False}, None, id="watched_too_shortly"),
        pytest.param({"colocated": 3}, (), {"fleet": None}, ("colocated", -1), id="no_requests"),
        pytest.param({"colocated": 1}, (), {}, None, id="no_requests_at_the_lower_bound"),
        pytest.param({"colocated": 3}, requests(1.5, slos=(3.0, 0.01)), {}, None, id="too_long_by_themselves"),
        pytest.param({"colocated": 3}, requests(1.5, slos=(math.inf, math.inf)), {}, None, id="without_slos"),
        pytest.param({"colocated": 2}, requests(0.01, LONG_ANSWERS, slos=(3.0, BARELY_S)), {}, None, id="barely_alone"),
        pytest.param({"colocated": 1}, requests(1.5), {"fleet": None}, None, id="steps_not_known"),
        pytest.param({"colocated": 1}, requests(1.5), {"pools": ()}, None, id="nobody_serves"),
    ],
)
def test_which_pool_changes(sizes, those, known, change):
    assert found(sizes, those, **known).change == change


def test_requests_that_take_too_long_by_themselves_count_for_nothing_beside_others():
    hopeless = requests(0.2, MIXED, slos=(0.1, math.inf))
    assert found({"colocated": 1}, hopeless).change is None
    both = sorted((*hopeless, *requests(0.2, MIXED, begin_s=0.7)), key=lambda one: one.arrival_s)
    assert found({"colocated": 3}, tuple(both)).change == ("colocated", -1)


@pytest.mark.parametrize(("kv_tokens", "change"), [(100_000, None), (600, ("colocated", 1))])
def test_a_worker_without_room_for_kv_is_joined_by_another(kv_tokens, change):
    known = fleet_model(1, kv_tokens=kv_tokens)
    assert found({"colocated": 1}, requests(0.3, (512, 64), slos=(3.0, 0.2)), fleet=known).change == change


def test_what_more_workers_than_one_are_wanted_for_is_known_before_they_come():
    far = found({"colocated": 1}, requests(3.0))
    assert far.change == ("colocated", 1)
    assert far.sizes["colocated"] > 2
    assert found(far.sizes, requests(3.0)).sizes == far.sizes


def test_the_sentence_has_the_numbers_that_led_to_the_decision():
    why = found(ONE_AND_ONE, requests(0.4), **QUEUE).why
    assert all(part in why for part in ("120 prompts wait", "prefill=1 decode=1", "prefill=4", "autoscale.goal is 95%"))
    assert "steps 20% longer" in found({"colocated": 3}, requests(0.3, MIXED)).why


def day(rates_per_s, workers=1, most=4):
    """One decision a minute, carried out at once, with the rate of each minute; returns how many workers there were."""
    came, there = [], [workers]
    for minute, per_s in enumerate(rates_per_s):
        begin_s = minute * MINUTE_S
        came += requests(per_s, for_s=MINUTE_S, begin_s=begin_s)
        since_s = begin_s + MINUTE_S - WINDOW_S
        latest = tuple(one for one in came if one.arrival_s >= since_s)
        now = {"colocated": there[-1]}
        there.append(found(now, latest, most=most, is_whole=since_s >= 0).change or ("", 0))
        there[-1] = now["colocated"] + there[-1][1]
    return there


def steps(there):
    return [after - before for before, after in pairwise(there) if after != before]


def test_a_load_that_triples_and_falls_is_followed_up_at_once_and_down_when_it_is_over():
    there = day([0.5] * 10 + [1.5] * 10 + [0.5] * 25)
    up, down = there.index(max(there)), len(there) - there[::-1].index(max(there))
    assert there[10] < max(there)
    assert up <= 15
    assert 20 <= down <= 35
    assert there[-1] == there[10]
    assert steps(there)[: max(there) - there[0]] == [1] * (max(there) - there[0]), "up, then down"


@pytest.mark.parametrize("per_s", [0.5, 1.4])
def test_under_a_steady_load_the_number_settles(per_s):
    for workers in (1, 4):
        there = day([per_s] * 20, workers)
        assert len({*steps(there[12:])}) <= 1, there
        assert len({*there[-6:]}) == 1, there


def test_a_load_that_comes_and_goes_every_minute_is_followed_by_no_change_once_there_are_enough():
    there = day([0.2, 1.8] * 20)
    assert {*steps(there)} == {1}, there
    assert len({*there[20:]}) == 1


class Elastic(Simulation):
    """Replicas whose steps take 1.4 times as long as is known, and of which one more comes 45 s after it is wanted."""

    paced = False
    STARTS_S = 45.0

    def __init__(self, *, sees_queue):
        self.known = fleet_model(4, step_tokens=2048)
        super().__init__(modelled(self.known.workers, 1.4), self, 0.03, by_deadline=False)
        self.sees_queue, self.serve, self.came, self.next_s = sees_queue, 1, [], MINUTE_S
        self.grew_s = []

    def assign(self, request, workers):
        return Colocated().assign(request, workers[: self.serve])

    def arrives(self, request):
        if self.grew_s and self.now_s >= self.grew_s[-1]:
            self.serve = 1 + len(self.grew_s)
        if self.now_s >= self.next_s and self.serve == 1 + len(self.grew_s):
            self.next_s = self.now_s + MINUTE_S
            waits = [one.prompt_tokens for one in self._waiting] if self.sees_queue else []
            queue = {"waiting_prompts": len(waits), "waiting_tokens": sum(waits)}
            if found({"colocated": self.serve}, tuple(self.came), is_whole=False, **queue).change:
                self.grew_s.append(self.now_s + self.STARTS_S)
        lengths, slos = (request.prompt_tokens, request.output_tokens), (request.ttft_slo_s, request.tpot_slo_s)
        self.came.append(Served(request.arrival_s, *lengths, *slos, None, None))
        super().arrives(request)


def test_a_queue_that_the_model_does_not_explain_is_seen_so_that_the_time_to_first_token_comes_down():
    """dynamo#10528: a planner blind to its queue let the mean TTFT go to 160 s where 3 s were promised."""
    worlds = {}
    for sees_queue in (True, False):
        prompts = poisson(1.5, 900, prompt_tokens=512, output_tokens=8, ttft_slo_s=3.0, tpot_slo_s=0.5, seed=3)
        worlds[sees_queue] = Elastic(sees_queue=sees_queue), prompts
        worlds[sees_queue][0].run(prompts)
    (world, prompts), (blind, _) = worlds[True], worlds[False]
    assert world.serve == 3
    assert world.grew_s[-1] < 4 * MINUTE_S < blind.grew_s[-1]
    late = [one.ttft_s for one in prompts if one.arrival_s > 5 * MINUTE_S]
    assert sum(late) / len(late) < 3.0
