"""Which workers a prompt gets by load, and what becomes of the workers' state when a policy chooses them."""

import math
from collections import Counter
from contextlib import ExitStack

import pytest
from msgspec.structs import replace

from ridgeline.contracts.workers import StepModel, WorkerStatus
from ridgeline.router.fleet.request_route import Demand
from ridgeline.router.fleet.worker import Worker
from ridgeline.router.placement.choice import ByLoad, ByPolicy, distance
from ridgeline.router.placement.learned import Learned
from ridgeline.router.scheduler.adaptive import Adaptive
from tests.support.lone_worker import lone_worker
from tests.support.samples import LAYOUT, worker_description

MODEL = StepModel(
    base_s=0.04,
    per_prefill_token_s=0.0017,
    per_sequence_s=0.002,
    per_context_token_s=0.0,
    per_attended_token_s=0.0,
    steps=100,
)
PROMPT = 512
ANSWERS = 4
SHORT = Demand(PROMPT, ANSWERS, ttft_limit_s=20.0, tpot_limit_s=0.15)


def a_worker(number: int, model: StepModel = MODEL, **description) -> Worker:
    worker = lone_worker(f"w{number}", layout=LAYOUT, num_kv_blocks=1000, max_model_len=4096, **description)
    worker.status = WorkerStatus(worker_id=f"w{number}", kv_blocks_free=900, step_model=model)
    return worker


class Fleet:
    """Workers, and choices among them by one policy."""

    def __init__(self, policy, *workers: Worker, min_remote_prefill_tokens: int = 0) -> None:
        self.workers = list(workers) or [a_worker(number) for number in range(2)]
        self.learned = Learned()
        adaptive = Adaptive(lambda: None, self.learned.traffic, always=(policy, {}))
        self.rules = ByPolicy(lambda: self.workers, self.learned, adaptive, min_remote_prefill_tokens)
        self.held = ExitStack()

    def decodes(self, worker: Worker, number: int, tpot_limit_s: float = math.inf) -> None:
        for _ in range(number):
            self.held.enter_context(worker.reserve(decode_context_tokens=544)).prompt_done()

    def prefills(self, worker: Worker, tokens: int = PROMPT) -> None:
        self.held.enter_context(worker.reserve(tokens))

    def choose(self, demand: Demand = SHORT, roomy=None):
        return self.rules.choose(demand, 0.0, self.workers if roomy is None else roomy)

    def ids(self, demand: Demand = SHORT, roomy=None):
        choice = self.choose(demand, roomy)
        return choice and (choice.worker.worker_id, (choice.decode_worker or choice.worker).worker_id)


@pytest.fixture
def fleet():
    made = []

    def make(*arguments, **options) -> Fleet:
        made.append(Fleet(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.held.close()


def test_a_whole_request_goes_to_the_worker_with_the_fewest_prompt_tokens(fleet):
    one = fleet("colocated")
    one.prefills(one.workers[0])
    assert one.ids() == ("w1", "w1")


def test_a_split_request_goes_to_one_worker_for_prompts_and_one_for_decode(fleet):
    one = fleet("disaggregated")
    one.decodes(one.workers[1], 5)
    assert one.ids() == ("w0", "w1")


def test_a_prompt_waits_for_the_worker_of_its_phase_and_an_urgent_one_does_not(fleet):
    one = fleet("disaggregated")
    assert one.choose(roomy=one.workers[1:]) is None
    assert one.choose(replace(SHORT, urgent=True), one.workers[1:]).worker is one.workers[1]


def test_a_worker_that_takes_no_work_is_not_waited_for(fleet):
    one = fleet("disaggregated")
    one.workers[0].held_back = True
    assert one.ids(roomy=one.workers[1:]) == ("w1", "w1")


def test_a_prompt_that_is_too_short_to_be_split_goes_whole_where_requests_decode(fleet):
    one = fleet("disaggregated", min_remote_prefill_tokens=PROMPT + 1)
    assert one.ids() == ("w1", "w1")


def test_what_a_worker_has_not_seen_is_predicted_as_another_worker_takes_it(fleet):
    prompts_only = replace(MODEL, base_s=0.0, per_sequence_s=0.0, per_prefill_token_s=0.002, knows_decode=False)
    answers_only = replace(MODEL, per_prefill_token_s=0.5, knows_prompts=False)
    for policy in ("disaggregated", "slack", "colocated"):
        one = fleet(policy, a_worker(0, prompts_only), a_worker(1, answers_only))
        assignment = one.choose().assignment
        assert assignment.tpot_s >= MODEL.decode_s(1, 0)
        assert assignment.ttft_s < 512 * 0.01


def test_nothing_is_predicted_while_no_worker_has_decoded(fleet):
    unknown = replace(MODEL, base_s=0.0, knows_decode=False)
    one = fleet("disaggregated", a_worker(0, unknown), a_worker(1, unknown))
    one.prefills(one.workers[0])
    choice = one.choose()
    assert choice.worker is one.workers[1], "by load: it has no prompt"
    assert choice.assignment is None


def test_a_model_that_says_that_decoding_takes_no_time_breaks_nothing(fleet):
    free = replace(MODEL, base_s=0.0, per_sequence_s=0.0)
    for policy in ("slack", "colocated, paced"):
        assert fleet(policy, a_worker(0, free), a_worker(1, free)).choose().assignment is not None


@pytest.mark.parametrize("policy", ["colocated, paced", "slack"])
def test_a_stream_with_a_limit_that_no_step_can_keep_moves_nobodys_prompts(fleet, policy):
    """With 1 us on three of four workers, all prompts of the others went to the fourth."""

    def chosen(limit_s: float) -> Counter[str]:
        one, where = fleet(policy, *(a_worker(number) for number in range(4))), Counter()
        for worker in one.workers[:3]:
            one.decodes(worker, 1, limit_s)
        for _ in range(40):
            choice = one.choose(Demand(PROMPT, 200))
            where[choice.worker.worker_id] += 1
            one.decodes(choice.decode_worker or choice.worker, 1)
        return where

    assert chosen(1e-6) == chosen(math.inf)


def test_a_prompt_goes_where_most_of_it_is_cached(fleet):
    one = fleet("colocated")
    prefix = tuple(range(100, 116))
    one.learned.computed(one.workers[1].description, prefix)
    one.prefills(one.workers[1], 200)
    choice = one.choose(Demand(PROMPT, ANSWERS, prefix=prefix))
    assert choice.worker is one.workers[1]
    assert choice.assignment.cached_tokens == PROMPT - 1


def test_a_prompt_takes_what_the_corrections_of_the_model_make_of_its_step(fleet):
    """On an H100 a step with a prompt takes 22 ms at least, and the line of the model said 5."""
    stairs = replace(MODEL, corrections=(*[1.0] * 10, 5.0))
    one = fleet("colocated", a_worker(0, stairs))
    expected_s = 5 * (MODEL.base_s + PROMPT * MODEL.per_prefill_token_s)
    assert one.choose().assignment.ttft_s == pytest.approx(expected_s, rel=0.01)
    one.decodes(one.workers[0], 1)
    assert one.choose(Demand(PROMPT, ANSWERS)).assignment.ttft_s == pytest.approx(expected_s, rel=0.05)


def test_an_answer_beside_one_that_takes_turns_with_it_is_predicted_to_take_twice_as_long(fleet):
    one = fleet("colocated", *(a_worker(number, node="n", device="cores 0") for number in range(2)))

    def predicted_s() -> float:
        return one.choose(replace(SHORT, urgent=True), one.workers[1:]).assignment.tpot_s

    alone_s = predicted_s()
    one.decodes(one.workers[0], 1)
    assert predicted_s() == pytest.approx(2 * alone_s)


# --- by load: the fixed modes

PREFIX = tuple(range(100, 116))
"""Of a prompt of `PROMPT` tokens."""
POOLS = ["prefill", "decode", "colocated"]


class ByLoads:
    """Workers of one pool, and choices among them by load."""

    def __init__(self, pool, number=2, **description) -> None:
        self.workers = [a_worker(n, **description) for n in range(number)]
        self.learned = Learned()
        self.rules = ByLoad(pool, self.learned)
        self.held = ExitStack()

    def holds(self, number, prompt_tokens=0, decodes=0, running=0):
        worker = self.workers[number]
        for _ in range(decodes):
            self.held.enter_context(worker.reserve(decode_context_tokens=10)).prompt_done()
        for _ in range(running):
            self.held.enter_context(worker.reserve())
        if prompt_tokens:
            self.held.enter_context(worker.reserve(prompt_tokens))

    def has(self, number, prefix=PREFIX):
        self.learned.computed(self.workers[number].description, prefix)

    def number(self, demand=SHORT, source=None):
        return self.workers.index(self.rules.best(demand, self.workers, source).worker)


ASKED = replace(SHORT, prefix=PREFIX)


@pytest.fixture
def by_load():
    with ExitStack() as ends:

        def make(*arguments, **options):
            made = ByLoads(*arguments, **options)
            ends.enter_context(made.held)
            return made

        yield make


@pytest.mark.parametrize("pool", POOLS)
def test_without_a_difference_the_first_worker_is_taken(by_load, pool):
    assert by_load(pool).number() == 0


@pytest.mark.parametrize("pool", ["prefill", "colocated"])
@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        ({"prompt_tokens": 4000}, {"prompt_tokens": 100, "running": 9}, 1),
        ({"prompt_tokens": 10}, {"running": 9}, 1),
        ({"prompt_tokens": 10}, {"decodes": 9}, 1),
        ({"running": 2}, {"running": 1}, 1),
        ({"decodes": 1}, {"running": 1}, 1),
    ],
)
def test_prompts_go_where_the_fewest_tokens_are_then_the_fewest_sequences_and_the_least_context(
    by_load, pool, first, second, chosen
):
    one = by_load(pool)
    one.holds(0, **first)
    one.holds(1, **second)
    assert one.number() == chosen


def test_decode_goes_where_the_fewest_sequences_are_whatever_prompts_are_there(by_load):
    one = by_load("decode")
    one.holds(0, decodes=2)
    one.holds(1, decodes=1, prompt_tokens=500)
    assert one.number() == 1


@pytest.mark.parametrize("pool", POOLS)
def test_a_prompt_goes_where_its_beginning_is_cached(by_load, pool):
    one = by_load(pool, 3)
    one.has(1, PREFIX[:4])
    one.has(2, PREFIX[:8])
    assert [one.number(), one.number(ASKED)] == [0, 2]


@pytest.mark.parametrize("pool", POOLS)
def test_what_a_worker_had_before_it_was_started_again_does_not_count(by_load, pool):
    one = by_load(pool)
    one.has(1)
    one.workers[1] = a_worker(1, incarnation="the next one")
    assert one.number(ASKED) == 0


@pytest.mark.parametrize("pool", POOLS)
def test_a_worker_that_the_router_does_not_reach_gets_nothing_for_what_it_has(by_load, pool):
    one = by_load(pool)
    one.has(1)
    assert one.number(replace(ASKED, avoided=frozenset({"w1"}))) == 0
    assert one.number(replace(ASKED, avoided=frozenset({"w0", "w1"}))) == 1, "it finds out itself"


def test_a_prompt_leaves_what_is_cached_once_twice_as_many_tokens_wait_there(by_load):
    one = by_load("prefill")
    one.has(1, PREFIX[:8])
    one.holds(1, prompt_tokens=2 * 8 * 32)
    assert one.number(ASKED) == 0
    one.holds(0, prompt_tokens=1)
    assert one.number(ASKED) == 1


@pytest.mark.parametrize("shared_blocks", [0, 12])
def test_a_common_beginning_does_not_send_all_answers_to_the_worker_that_has_it(by_load, shared_blocks):
    """Each prompt is computed before the next one comes, so prompt tokens alone would never send one elsewhere."""
    one = by_load("colocated", 4)
    for request in range(64):
        prefix = (*PREFIX[:shared_blocks], *range(1000 * request, 1000 * request + 16 - shared_blocks))
        number = one.number(Demand(PROMPT, 200, prefix=prefix))
        one.holds(number, decodes=1)
        one.has(number, prefix)
    decodes = [worker.outstanding.decodes for worker in one.workers]
    assert max(decodes) - min(decodes) <= 8, decodes


def test_conversations_stay_where_they_are_and_are_spread_over_the_workers(by_load):
    one, where = by_load("colocated", 2), {}
    for turn in range(4):
        for talk in range(8):
            prefix = tuple(range(1000 * talk, 1000 * talk + 4 * (turn + 1)))
            number = one.number(Demand(32 * len(prefix), 50, prefix=prefix))
            assert where.setdefault(talk, number) == number
            one.has(number, prefix)
            if turn == 0:
                one.holds(number, decodes=1)
    assert Counter(where.values()) == {0: 4, 1: 4}


def test_of_decode_workers_with_as_many_sequences_the_one_with_the_beginning_is_taken(by_load):
    one = by_load("decode")
    one.has(1)
    one.holds(1, decodes=1)
    assert one.number(ASKED) == 0, "a sequence costs more than a fetch"
    one.holds(0, decodes=1)
    assert one.number(ASKED) == 1


def test_a_nearer_decode_worker_may_run_a_tenth_more_and_an_idle_one_is_always_taken(by_load):
    source = a_worker(9, node="n0", rack="r0")

    def chosen(*decodes):
        one = by_load("decode", 3, max_num_seqs=99)
        places = [{"node": "n0", "rack": "r0"}, {"node": "n1", "rack": "r0"}, {"node": "n2", "rack": "r2"}]
        one.workers = [a_worker(n, max_num_seqs=99, **place) for n, place in enumerate(places)]
        for number, running in enumerate(decodes):
            one.holds(number, decodes=running)
        return one.number(source=source)

    assert [chosen(0, 0, 0), chosen(1, 0, 0), chosen(1, 1, 0)] == [0, 1, 2]
    assert [chosen(22, 20, 20), chosen(23, 20, 20), chosen(23, 23, 20), chosen(25, 23, 20)] == [0, 1, 0, 2]


def test_workers_of_one_node_are_nearest_then_those_of_one_rack_and_the_unknown_are_far():
    here = worker_description(node="n1", rack="r1")
    assert distance(here, worker_description(node="n1", rack="r1")) == 0
    assert distance(here, worker_description(node="n2", rack="r1")) == 1
    assert distance(here, worker_description(node="n2", rack="r2")) == 2
    assert distance(worker_description(), worker_description()) == 2


@pytest.mark.parametrize(
    ("free", "promised", "most", "chosen"),
    [(16, 0, 99, 0), (15, 0, 99, 1), (16, 1, 99, 1), (16, 0, 1, 1)],
    ids=["room", "no blocks", "promised blocks", "full batch"],
)
def test_decode_goes_where_the_blocks_are_and_not_where_fewest_run_or_what_is_near(
    by_load, free, promised, most, chosen
):
    source = a_worker(9, node="n0")
    one = by_load("decode")
    one.workers = [a_worker(0, node="n0", max_num_seqs=most), a_worker(1, max_num_seqs=99)]
    one.workers[0].status = WorkerStatus(worker_id="w0", kv_blocks_free=free)
    one.held.enter_context(one.workers[0].reserve(promised_blocks=promised))
    one.holds(1, decodes=20)
    assert one.number(Demand(PROMPT), source) == chosen


# --- LoRA adapters


SQL = replace(SHORT, adapter="sql@1")


def adapted(number, *loaded, **description):
    worker = a_worker(number, max_loras=1, max_cpu_loras=2, **description)
    worker.adapters.loaded |= {*loaded}
    return worker


@pytest.mark.parametrize("busy", [0, 3])
def test_a_worker_without_the_adapter_gets_none_of_its_requests(busy):
    fleet = Fleet("colocated", adapted(0), adapted(1, "sql@1"), adapted(2, "sql@2"))
    fleet.decodes(fleet.workers[1], busy)
    assert fleet.ids(SQL) == ("w1", "w1")
    by_load = ByLoad("colocated", fleet.learned)
    assert by_load.best(SQL, fleet.workers).worker.worker_id == "w1"


def test_a_worker_whose_steps_have_other_adapters_is_left_out_while_another_has_a_place():
    fleet = Fleet("colocated", adapted(0, "sql@1", "chat@1"), adapted(1, "sql@1"))
    fleet.held.enter_context(fleet.workers[0].reserve(decode_context_tokens=1, adapter="chat@1"))
    fleet.decodes(fleet.workers[1], 5)
    assert fleet.ids(SQL) == ("w1", "w1")
    fleet.held.close()
    assert fleet.ids(SQL) == ("w0", "w0")


@pytest.mark.parametrize(("more", "chosen"), [(0, "w1"), (2, "w1"), (3, "w0")])
def test_a_worker_that_has_the_adapter_in_memory_is_preferred_unless_it_is_much_busier(more, chosen):
    fleet = Fleet("colocated", adapted(0, "sql@1"), adapted(1, "sql@1"))
    fleet.workers[1].adapters.load("sql@1")
    fleet.decodes(fleet.workers[1], more)
    assert fleet.ids(SQL) == (chosen, chosen)


def test_an_adapter_leaves_memory_after_as_many_others_as_there_is_room_for():
    adapters = adapted(0).adapters
    for key in ("a", "b", "a", "c"):
        adapters.count(key, 1)
        adapters.count(key, -1)
    assert [key for key in "abc" if adapters.must_read(key)] == ["b"]
    assert not adapters.must_read("")


def test_no_prompt_waits_for_a_full_worker_only_because_that_one_has_its_adapter_in_memory():
    fleet = Fleet("colocated", adapted(0, "sql@1"), adapted(1, "sql@1"))
    fleet.workers[1].adapters.load("sql@1")
    fleet.prefills(fleet.workers[1], 4000)
    assert fleet.ids(SQL, fleet.workers[:1]) == ("w0", "w0")


def test_a_worker_has_as_many_tokens_as_its_cache_has_in_a_block_whatever_the_settings_say(by_load):
    one = by_load("prefill", prefix_block_tokens=160)
    asked = replace(SHORT, prefix=PREFIX[:3])
    one.has(1, PREFIX[:2])
    found = one.rules.best(asked, one.workers)
    assert (one.workers.index(found.worker), found.cached_tokens) == (1, 2 * 160)
    one.held.enter_context(one.workers[0].reserve(1, last_block=PREFIX[2]))
    found = one.rules.best(asked, one.workers)
    assert (one.workers.index(found.worker), found.cached_tokens) == (0, 3 * 160)
