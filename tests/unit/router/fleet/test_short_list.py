"""Which workers of a large fleet are looked at."""

import pytest

from ridgeline.router.fleet.short_list import FOR_ANSWER, FOR_PREFIX, FOR_PROMPT, short_list
from ridgeline.router.fleet.worker import Worker
from tests.support.samples import LAYOUT, worker_description

PROMPT_TOKENS = 500


class Client:
    connected = True
    failed_s = float("-inf")


def a_worker(number, *, prompt_tokens=0, decodes=0, promised_blocks=0, running=None, favours=None):
    worker = Worker(Client(), worker_description(worker_id=f"w{number}", pool="adaptive", layout=LAYOUT))
    now = worker.outstanding
    now.prompt_tokens, now.decodes, now.promised_blocks, now.favours = prompt_tokens, decodes, promised_blocks, favours
    now.running = decodes if running is None else running
    return worker


def names(workers, needed_blocks=1, holders=(), open_workers=None):
    takes_prompt = set(workers) if open_workers is None else open_workers
    looked_at = short_list(workers, PROMPT_TOKENS, needed_blocks, takes_prompt, lambda _: holders)
    return {worker.worker_id for worker in looked_at}


def test_a_small_fleet_is_looked_at_as_a_whole():
    workers = [a_worker(number, prompt_tokens=number) for number in range(FOR_PROMPT + FOR_ANSWER + FOR_PREFIX)]
    assert short_list(workers, PROMPT_TOKENS, 1, set(workers)) == workers


def test_of_a_large_fleet_those_with_the_fewest_prompt_tokens_and_those_with_the_fewest_answers_are_looked_at():
    workers = [a_worker(number, prompt_tokens=number * 1000, decodes=40 - number) for number in range(20)]
    assert names(workers) == {"w0", "w1", "w2", "w18", "w19"}


def test_of_workers_with_as_many_prompt_tokens_those_with_the_fewest_answers_come_first():
    workers = [a_worker(number, decodes=(40 - number) % 41) for number in range(20)]
    assert names(workers) == {"w17", "w18", "w19"}


def test_a_worker_with_many_answers_and_no_prompts_comes_after_one_with_a_prompt_and_no_answers():
    gathered = [a_worker(number, decodes=20) for number in range(10)]
    without = [a_worker(10 + number, prompt_tokens=600 + number) for number in range(6)]
    assert names(gathered + without) == {"w0", "w1", "w10", "w11", "w12"}


def test_answers_gather_on_workers_that_have_some():
    workers = [a_worker(number, prompt_tokens=10 * (number < 10)) for number in range(20)]
    workers[4].outstanding.decodes = 5
    assert "w4" in names(workers)


@pytest.mark.parametrize("full", [{"promised_blocks": 10**9}, {"running": 10**6}])
def test_a_worker_without_room_is_not_looked_at_for_its_few_answers(full):
    workers = [a_worker(number, prompt_tokens=100 + number, decodes=10 + number) for number in range(20)]
    workers[19] = a_worker(19, prompt_tokens=10_000, decodes=1, **full)
    assert "w19" not in names(workers)


def test_a_worker_that_takes_a_prompt_now_is_looked_at_however_many_answers_it_has():
    full = [a_worker(number, prompt_tokens=3000, decodes=number // 3) for number in range(5)]
    open_workers = [a_worker(5 + number, decodes=30 + number) for number in range(20)]
    looked_at = names(full + open_workers, open_workers=set(open_workers[2:]))
    assert looked_at == {"w0", "w1", "w2", "w3", "w4", "w7"}


def by_what_they_have(workers, *groups):
    return [[workers[number] for number in group] for group in groups]


def test_workers_with_most_of_the_prompt_are_looked_at_however_busy_they_are():
    workers = [a_worker(number, prompt_tokens=100 * number, decodes=1 + number) for number in range(20)]
    has_it = by_what_they_have(workers, [], [13], [15], [14], [12, 16])
    assert names(workers, holders=has_it) == {"w0", "w1", "w2", "w13", "w14", "w15"}


def test_of_workers_with_as_much_of_the_prompt_those_with_the_fewest_prompt_tokens_are_looked_at():
    workers = [a_worker(number, prompt_tokens=100 * number, decodes=1 + number) for number in range(20)]
    has_it = by_what_they_have(workers, [], [19, 18, 17, 16, 15])
    assert names(workers, holders=has_it) == {"w0", "w1", "w2", "w15", "w16", "w17"}


def test_workers_that_have_no_more_of_the_prompt_than_one_with_few_prompt_tokens_are_not_looked_at():
    workers = [a_worker(number, prompt_tokens=100 * number, decodes=1 + number) for number in range(20)]
    has_it = by_what_they_have(workers, [], [13], [2, 14], [15])
    assert names(workers, holders=has_it) == {"w0", "w1", "w2", "w13"}


def test_workers_that_favour_a_phase_are_looked_at_for_it_first_and_for_the_other_one_last():
    prefills = [a_worker(number, prompt_tokens=1000 + number, favours="prefill") for number in range(10)]
    decodes = [a_worker(10 + number, decodes=number, favours="decode") for number in range(10)]
    assert names(prefills + decodes) == {"w0", "w1", "w2", "w10", "w11"}
    assert names(prefills[:1] + decodes) == {"w0", "w10", "w11"}, "of those that favour decode the same ones"


def test_a_worker_that_favours_nothing_and_has_no_answers_comes_before_those_that_favour_prefill():
    prefills = [a_worker(number, favours="prefill") for number in range(4)]
    full = [a_worker(4 + number, decodes=1, promised_blocks=10**9, favours="decode") for number in range(8)]
    joined = a_worker(12, prompt_tokens=5000)
    assert "w12" in names([*prefills, *full, joined])
