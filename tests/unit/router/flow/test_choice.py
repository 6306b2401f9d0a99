"""What becomes of the workers' state when a prompt's are chosen by prediction."""

import math
from collections import Counter
from contextlib import ExitStack

import pytest
from msgspec.structs import replace

from ridgeline.contracts.workers import TPOT_LIMIT_USED, StepModel, WorkerStatus
from ridgeline.router.fleet.corrections import FADES_S, Corrections
from ridgeline.router.fleet.policy import Demand
from ridgeline.router.fleet.worker import Worker
from ridgeline.router.flow.choice import PROMPTS_WINDOW_S, ByPrediction
from ridgeline.router.flow.learned import Learned
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


class Client:
    connected = True
    failed_s = float("-inf")


class Gone(Client):
    connected = False


def a_worker(number: int, **description) -> Worker:
    described = worker_description(
        worker_id=f"w{number}",
        pool="adaptive",
        layout=LAYOUT,
        num_kv_blocks=1000,
        max_model_len_tokens=4096,
        **description,
    )
    worker = Worker(Client(), described)
    worker.status = WorkerStatus(worker_id=f"w{number}", kv_blocks_free=900, step_model=MODEL)
    return worker


class Pair:
    """A worker that computes a prompt, and one that decodes two answers."""

    def __init__(self) -> None:
        self.workers = [a_worker(number) for number in range(2)]
        self.first, self.second = self.workers
        self.now_s = 0.0
        self.rules = ByPrediction("adaptive", lambda: self.workers, Learned(32), clock=lambda: self.now_s)
        self.held = ExitStack()
        self.held.enter_context(self.first.reserve(PROMPT))
        for _ in range(2):
            answer = self.second.reserve(decode_context_tokens=544, tpot_limit_s=0.15)
            self.held.enter_context(answer).prompt_done()

    def choose(self, roomy: list[Worker], *, urgent: bool = False):
        return self.rules.choose(SHORT, 0.0, roomy, urgent=urgent)


@pytest.fixture
def pair():
    found = Pair()
    with found.held:
        yield found


def test_a_prompt_goes_beside_a_few_answers_rather_than_wait_in_the_router(pair):
    assert pair.choose(pair.workers).worker is pair.first
    chosen = pair.choose([pair.second])
    assert chosen.worker is pair.second
    assert not chosen.decision.chosen.waits
    assert any(option.waits for option in chosen.decision.others)


def test_a_prompt_waits_where_it_would_make_many_others_wait_and_an_urgent_one_does_not(pair):
    for _ in range(10):
        answer = pair.second.reserve(decode_context_tokens=544, tpot_limit_s=0.15)
        pair.held.enter_context(answer).prompt_done()
    assert pair.choose([pair.second]) is None
    assert pair.choose([pair.second], urgent=True).worker is pair.second


def test_a_worker_that_takes_no_work_is_not_waited_for(pair):
    for _ in range(10):
        answer = pair.second.reserve(decode_context_tokens=544, tpot_limit_s=0.15)
        pair.held.enter_context(answer).prompt_done()
    pair.first.held_back = True
    assert pair.choose([pair.second]).worker is pair.second


def test_the_load_by_prompts_is_what_was_placed_of_late_on_those_that_work(pair):
    pair.now_s = 100.0
    loads = []
    for _ in range(2):
        choice = pair.rules.choose(Demand(PROMPT, ANSWERS), 0.0, pair.workers, urgent=False)
        loads.append(choice.decision.wanted.prompt_load)
    assert loads == [0.0, pytest.approx((0.04 + PROMPT * 0.0017) / PROMPTS_WINDOW_S)]
    pair.now_s += PROMPTS_WINDOW_S
    faded = pair.rules.choose(Demand(PROMPT, ANSWERS), 0.0, pair.workers, urgent=True).decision.wanted.prompt_load
    assert faded == pytest.approx(2 * loads[1] / math.e)
    pair.first.client = Gone()
    alone = pair.rules.choose(Demand(PROMPT, ANSWERS), 0.0, [pair.second], urgent=False).decision.wanted.prompt_load
    assert alone == pytest.approx(faded), "all prompts go to the one that is left"


def test_what_a_worker_has_not_seen_is_predicted_as_another_worker_takes_it(pair):
    prompts_only = replace(MODEL, base_s=0.0, per_sequence_s=0.0, per_prefill_token_s=0.002, knows_decode=False)
    answers_only = replace(MODEL, per_prefill_token_s=0.5, knows_prompts=False)
    for worker, model in ((pair.first, prompts_only), (pair.second, answers_only)):
        worker.status = replace(worker.status, step_model=model)
    decision = pair.choose(pair.workers).decision
    for option in (decision.chosen, *decision.others):
        assert option.tpot_s >= MODEL.decode_s(1, 0)
        assert option.ttft_s < 512 * 0.01


def test_nothing_is_predicted_while_no_worker_has_decoded(pair):
    for worker in pair.workers:
        worker.status = replace(worker.status, step_model=replace(MODEL, base_s=0.0, knows_decode=False))
    choice = pair.choose(pair.workers)
    assert choice.worker is pair.second, "by load: it has no prompt"
    assert choice.decision is None


def test_a_model_that_says_that_decoding_takes_no_time_breaks_nothing(pair):
    for worker in pair.workers:
        worker.status = replace(worker.status, step_model=replace(MODEL, base_s=0.0, per_sequence_s=0.0))
    assert pair.choose(pair.workers).decision is not None


@pytest.mark.parametrize("limit_s", [1e-6, 1.05 * MODEL.decode_s(1, 0) / TPOT_LIMIT_USED])
def test_a_stream_with_a_limit_that_no_step_can_keep_moves_nobodys_prompts(limit_s: float):
    """With 1 us on three of four workers, all prompts of the others went to the fourth."""

    def chosen(limit_s: float) -> Counter[str]:
        workers = [a_worker(number) for number in range(4)]
        rules, where = ByPrediction("adaptive", lambda: workers, Learned(32)), Counter()
        with ExitStack() as held:
            for worker in workers[:3]:
                held.enter_context(worker.reserve(decode_context_tokens=500, tpot_limit_s=limit_s)).prompt_done()
            for _ in range(40):
                choice = rules.choose(Demand(PROMPT, 200), 0.0, workers, urgent=False)
                where[choice.worker.worker_id] += 1
                decodes = (choice.decode_worker or choice.worker).reserve(decode_context_tokens=600)
                held.enter_context(decodes).prompt_done()
        return where

    assert chosen(limit_s) == chosen(math.inf)


TWO_STATES = StepModel(
    base_s=0.055,
    per_prefill_token_s=0.0006,
    per_sequence_s=0.00005,
    per_context_token_s=0.0,
    per_attended_token_s=0.0,
    steps=100,
)
"""Steps in which one more answer costs next to nothing, as on a CPU with AMX."""
WITHIN = Demand(PROMPT, 64, ttft_limit_s=2.0, tpot_limit_s=0.095)


class OneDecodes(Pair):
    """One worker decodes forty answers, the other one is idle."""

    def __init__(self, min_remote_prefill_tokens: int = 0) -> None:
        super().__init__()
        self.held.close()
        self.idle, self.decoder = self.workers
        for worker in self.workers:
            worker.status = replace(worker.status, step_model=TWO_STATES)
        for _ in range(40):
            answer = self.decoder.reserve(decode_context_tokens=544, tpot_limit_s=0.095)
            self.held.enter_context(answer).prompt_done()
        self.learned = Learned(32)
        for _ in range(20):
            self.learned.answered(64, 64)
        self.rules = ByPrediction(
            "adaptive", lambda: self.workers, self.learned, min_remote_prefill_tokens, clock=lambda: self.now_s
        )

    def pair_of(self, roomy=None):
        choice = self.rules.choose(WITHIN, 0.0, roomy or self.workers, urgent=False)
        return choice and (choice.worker, choice.decode_worker or choice.worker)


@pytest.fixture
def one_decodes():
    found = OneDecodes()
    with found.held:
        yield found


def test_a_prompt_is_computed_by_the_idle_worker_rather_than_in_short_chunks_beside_all_answers(one_decodes):
    """It was not, since its step on the idle worker counted as work; so one worker did all, and prompts crawled."""
    assert one_decodes.pair_of() == (one_decodes.idle, one_decodes.decoder)


def test_no_prompt_waits_for_a_full_worker_while_another_one_is_idle(one_decodes):
    assert one_decodes.pair_of(roomy=[one_decodes.idle]) is not None


def test_a_prompt_that_is_too_short_to_be_split_waits_for_no_full_worker_either():
    """The idle worker is slower, so the prompt would do better on the other one, once it has room."""
    one = OneDecodes(min_remote_prefill_tokens=PROMPT + 1)
    slow = replace(TWO_STATES, base_s=20 * TWO_STATES.base_s)
    one.idle.status = replace(one.idle.status, step_model=slow)
    with one.held:
        assert one.pair_of() == (one.decoder, one.decoder), "it may wait where nobody is idle"
        assert one.pair_of(roomy=[one.idle]) == (one.idle, one.idle)


def test_prompts_leave_a_worker_beside_whose_answers_they_take_longer_than_predicted_and_come_back_later(one_decodes):
    """Seen on engines: 2.4 times the predicted time, again and again, while nothing learned from it."""
    for _ in range(2):
        one_decodes.held.enter_context(one_decodes.idle.reserve(PROMPT))
    assert one_decodes.pair_of()[0] is one_decodes.decoder
    now_s = 0.0
    corrections = one_decodes.learned.corrections = Corrections(lambda: now_s)
    for _ in range(8):
        decision = one_decodes.rules.choose(WITHIN, 0.0, one_decodes.workers, urgent=False).decision
        if decision.chosen.prompt_worker != one_decodes.decoder.worker_id:
            break
        one_decodes.learned.prompt_took(decision, 4.5 * decision.chosen.ttft_s / decision.chosen.slower)
    assert one_decodes.pair_of()[0] is one_decodes.idle
    assert corrections.ratio(one_decodes.decoder.worker_id, beside=True) > 1.0
    now_s += FADES_S
    assert one_decodes.pair_of()[0] is one_decodes.decoder, "it is tried again"


@pytest.mark.parametrize(("node", "shares"), [("n", True), ("another", False), ("", False)])
def test_answers_gather_on_one_of_the_workers_that_take_turns_and_spread_over_others(node, shares):
    """At 256/128 on one H100, answers on both of its engines took 15.2 ms a token instead of 8.3."""
    workers = [a_worker(0, node="n", device="GPUs 0"), a_worker(1, node=node, device="GPUs 0")]
    rules = ByPrediction("adaptive", lambda: workers, Learned(32))
    with ExitStack() as held:
        for _ in range(8):
            held.enter_context(workers[0].reserve(decode_context_tokens=320)).prompt_done()
        choice = rules.choose(Demand(256, 128), 0.0, workers, urgent=False)
        decodes_on = choice.decode_worker or choice.worker
        assert (decodes_on is workers[0]) == shares


def test_an_answer_beside_one_that_takes_turns_with_it_is_predicted_to_take_twice_as_long():
    workers = [a_worker(number, node="n", device="cores 0") for number in range(2)]
    rules = ByPrediction("adaptive", lambda: workers, Learned(32))

    def predicted_s() -> float:
        return rules.choose(Demand(256, 128), 0.0, workers[1:], urgent=True).decision.chosen.tpot_s

    alone_s = predicted_s()
    with workers[0].reserve(decode_context_tokens=320) as answer:
        answer.prompt_done()
        assert predicted_s() == pytest.approx(2 * alone_s)


@pytest.mark.parametrize("per_device", [1, 2])
def test_workers_that_take_turns_are_never_divided(per_device):
    workers = [a_worker(number, node="n", device=f"GPUs {number // per_device}") for number in range(4)]
    now_s, learned = 0.0, Learned(32, "act")
    rules = ByPrediction("adaptive", lambda: workers, learned, clock=lambda: now_s)
    for _ in range(100):
        now_s += 0.5
        rules.choose(Demand(PROMPT, 128, ttft_limit_s=5.0, tpot_limit_s=0.06), 0.0, workers, urgent=False)
    assert learned.rebalancer.divides == (per_device == 1)


def test_a_prompt_takes_what_the_corrections_of_the_model_make_of_its_step():
    """On an H100 a step with a prompt takes 22 ms at least, and the line of the model said 5."""
    stairs = replace(MODEL, corrections=(*[1.0] * 10, 5.0))
    worker = a_worker(0)
    worker.status = replace(worker.status, step_model=stairs)
    rules = ByPrediction("adaptive", lambda: [worker], Learned(32))
    for decoding in (0, 1):
        with ExitStack() as held:
            for _ in range(decoding):
                held.enter_context(worker.reserve(decode_context_tokens=320)).prompt_done()
            decision = rules.choose(Demand(PROMPT, ANSWERS), 0.0, [worker], urgent=False).decision
        assert decision.chosen.ttft_s == pytest.approx(
            5 * (MODEL.base_s + PROMPT * MODEL.per_prefill_token_s), rel=0.01
        )
