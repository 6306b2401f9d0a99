"""What becomes of the workers' state when a policy chooses a prompt's workers."""

import math
from collections import Counter
from contextlib import ExitStack

import pytest
from msgspec.structs import replace

from ridgeline.contracts.workers import StepModel, WorkerStatus
from ridgeline.router.fleet.policy import Demand
from ridgeline.router.fleet.worker import Worker
from ridgeline.router.placement.choice import ByPolicy
from ridgeline.router.placement.learned import Learned
from ridgeline.router.scheduler.adaptive import Adaptive
from tests.support.lone_worker import lone_worker
from tests.support.samples import LAYOUT

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
    worker = lone_worker(f"w{number}", layout=LAYOUT, num_kv_blocks=1000, max_model_len_tokens=4096, **description)
    worker.status = WorkerStatus(worker_id=f"w{number}", kv_blocks_free=900, step_model=model)
    return worker


class Fleet:
    """Workers, and choices among them by one policy."""

    def __init__(self, policy, *workers: Worker, min_remote_prefill_tokens: int = 0) -> None:
        self.workers = list(workers) or [a_worker(number) for number in range(2)]
        self.learned = Learned(32)
        adaptive = Adaptive(lambda: None, self.learned.traffic, always=(policy, {}))
        self.rules = ByPolicy("adaptive", lambda: self.workers, self.learned, adaptive, min_remote_prefill_tokens)
        self.held = ExitStack()

    def decodes(self, worker: Worker, number: int, tpot_limit_s: float = math.inf) -> None:
        for _ in range(number):
            self.held.enter_context(worker.reserve(decode_context_tokens=544)).prompt_done()

    def prefills(self, worker: Worker, tokens: int = PROMPT) -> None:
        self.held.enter_context(worker.reserve(tokens))

    def choose(self, demand: Demand = SHORT, roomy=None, *, urgent: bool = False):
        return self.rules.choose(demand, 0.0, self.workers if roomy is None else roomy, urgent=urgent)

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
    assert one.choose(roomy=one.workers[1:], urgent=True).worker is one.workers[1]


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
        return one.choose(roomy=one.workers[1:], urgent=True).assignment.tpot_s

    alone_s = predicted_s()
    one.decodes(one.workers[0], 1)
    assert predicted_s() == pytest.approx(2 * alone_s)
