"""Estimates what a fleet holds and how long answers take, if all workers do all or some favour one phase. Pure.

The estimate is for the mean request of the latest traffic, to choose by. With p prompt tokens, o output tokens, TTFT
limit F and TPOT limit L, N workers, and the worker's own model of its steps:

- k workers that favour prefill compute a prompt, as far as they do not have it, in s seconds. They hold k / s
  requests/s times the part of their time that may be used so that nine of ten prompts wait less than F - s:
  1 / (1 + `WAIT` s / (k (F - s))), from the exponential tail of a queue with k servers and one service time.
- The N - k others have M = (N - k) n places, n being the mean number of sequences whose step takes L, or fewer if there
  are no KV blocks for them. Arrivals vary, so M - `SPARED` sqrt(M) of them are used on average, and each gives o tokens
  in o steps.
- A fleet without favours computes prompts in what decode leaves of its steps: of each step of T seconds, the base is
  lost, and N (1 - base / T) / (time of the prompt's tokens + time of o tokens) requests/s remain. T is the longest step
  that the engine allows: `TPOT_LIMIT_USED` L, or a step full of prompt tokens if that is shorter.
- Where T is `ROOMY` times a step of one sequence, such a fleet also comes to a division by itself, and to more:
  answers gather on N - k workers, and prompts go to the others, r(k) requests/s, and beside the answers. With w and a,
  the times that the prompt's tokens and an answer add to steps, that is (r(k) w + (N - k) (1 - base / T)) / (w + a), as
  far as a prompt beside answers is in time: what they leave of a step must be at least w / F of it. Choices one at a
  time find `FOUND` of the best of these.

Without limits the mean latency counts, at the rate r that there is. A prompt waits for one of c workers that are busy
for a part u of their time with S seconds for each prompt: u^(sqrt(2 (c + 1)) - 1) / (c (1 - u)) S / 2, Sakasegawa's
approximation (1977) for one service time. An answer finds n others on its worker, which takes D = o step(n + 1) /
(1 - v) seconds for it, v being the part of its time for which the worker computes prompts, and n = D r / workers that
decode. In a division each prompt's KV is handed over.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Final

import msgspec

from ridgeline.contracts.workers import TPOT_LIMIT_USED, StepModel
from ridgeline.router.fleet.prediction import Asked

WAIT: Final = 1.15
"""ln(10) / 2."""
SPARED: Final = 0.7
"""Standard deviations of the number of sequences that decode, for which places are spared. Chosen by simulation: a busy
prefill worker hands over at even intervals, so that fewer are needed than for arrivals by chance."""
SHORTEST_S: Final = 1e-9
"""No time is taken to be shorter: a fit to few kinds of steps may find that something takes none."""
ROOMY: Final = 1.75
"""Steps of one sequence in the longest step, from which on prompts beside answers do not come in too small pieces."""
FOUND: Final = 0.85
"""The part of what the best gathering of answers would hold that choices one at a time find. Chosen by simulation
(`tools.bench.simulated_modes`): a division of two workers holds less than that where steps are long, since neither is
used as it could be; one of eight holds more."""
HALVINGS: Final = 16
"""With which the number of answers on a worker is searched for, among as many as it has places."""
MOST_USED: Final = 0.97
"""The part of their time that workers which only compute prompts can be used at most."""


class Traffic(Asked, frozen=True, kw_only=True):
    """The mean request, and how many there are."""

    requests_per_s: float
    computed_tokens: float
    """Tokens of the prompt that no prefix cache has."""
    attended_tokens: float
    """What these attend to, see `prediction.attended`."""


class Workers(msgspec.Struct, frozen=True):
    """The workers of a fleet, which are taken to be alike."""

    model: StepModel
    number: int
    step_tokens: int
    """Tokens that one step computes at most."""
    places: int
    """Sequences that one of them runs at a time."""
    kv_tokens: int
    """Tokens for which one of them has KV blocks."""
    handover_s_per_token: float = 0.0
    """Seconds for which the KV of a token of the prompt is on its way from one to another."""


def held_per_s(workers: Workers, traffic: Traffic, prefill_workers: int) -> float:
    """Return the requests/s within limits that a fleet holds of which so many favour prefill, and the rest decode.

    0: none favours anything.
    """
    if prefill_workers:
        decode_workers = workers.number - prefill_workers
        return min(_prefills(workers, traffic, prefill_workers), _decodes(workers, traffic, decode_workers))
    together = _together(workers, traffic)
    if not _is_roomy(workers, traffic):
        return together
    gathered = max((_gathered(workers, traffic, number) for number in range(1, workers.number)), default=0.0)
    return max(together, FOUND * gathered)


def mean_latency_s(workers: Workers, traffic: Traffic, prefill_workers: int) -> float:
    """Return the mean seconds from a request's arrival to its last token; inf if there are more than it can serve.

    So many workers of the fleet favour prefill, and the rest decode.

    0: none favours anything.
    """
    per_s, tokens_s = traffic.requests_per_s, _tokens_s(workers.model, traffic) * _prompt_correction(workers, traffic)
    steps = math.ceil(traffic.computed_tokens / workers.step_tokens)
    if prefill_workers:
        prompt_s = steps * workers.model.base_s + tokens_s
        handover_s = traffic.prompt_tokens * workers.handover_s_per_token
        answer_s = handover_s + _answer_latency_s(workers, traffic, workers.number - prefill_workers, 0.0)
        return _queue_s(per_s, prompt_s, prefill_workers) + prompt_s + answer_s
    prompts = per_s * tokens_s / workers.number
    answer_s = _answer_latency_s(workers, traffic, workers.number, prompts)
    if answer_s == math.inf:
        return math.inf
    prompt_s = tokens_s + steps * answer_s * (1 - prompts) / traffic.output_tokens
    return _queue_s(per_s, prompt_s, workers.number) + prompt_s + answer_s


def _prompt_correction(workers: Workers, traffic: Traffic) -> float:
    """Return what the model's corrections make of a step with as many tokens of the prompt as it may have."""
    model, tokens = workers.model, min(traffic.computed_tokens, workers.step_tokens)
    line_s = model.base_s + model.per_prefill_token_s * tokens
    return model.step_s(tokens, 0, 0, 0) / line_s if line_s else 1.0


def _queue_s(per_s: float, service_s: float, servers: int) -> float:
    """Return the mean wait for one of the servers."""
    used = per_s * service_s / servers
    if used >= 1.0:
        return math.inf
    return math.pow(used, math.sqrt(2 * (servers + 1)) - 1) / (servers * (1 - used)) * service_s / 2


def _answer_latency_s(workers: Workers, traffic: Traffic, number: int, prompts: float) -> float:
    """Return the seconds of an answer on one of so many workers, which compute prompts for this part of their time."""
    if prompts >= 1.0:
        return math.inf
    begun = traffic.requests_per_s / number * traffic.output_tokens / (1 - prompts)
    low, high = 0.0, min(workers.places, workers.kv_tokens / traffic.context_tokens) - 1
    if high <= 0.0 or begun * _step_s(workers, traffic, high + 1) > high:
        return math.inf
    for _ in range(HALVINGS):
        others = (low + high) / 2
        if begun * _step_s(workers, traffic, others + 1) > others:
            low = others
        else:
            high = others
    return traffic.output_tokens * _step_s(workers, traffic, high + 1) / (1 - prompts)


def needs_no_division(workers: Workers, traffic: Traffic, prefill_workers: int) -> bool:
    """Return whether steps leave so much time for prompts that this division holds no more than none."""
    divided = held_per_s(workers, traffic, prefill_workers)
    return _is_roomy(workers, traffic) and held_per_s(workers, traffic, 0) >= divided


def _is_roomy(workers: Workers, traffic: Traffic) -> bool:
    return _longest_step_s(workers, traffic) >= ROOMY * _step_s(workers, traffic, 1)


def best_shape(workers: Workers, traffic: Traffic) -> int:
    """Return how many workers should favour prefill; 0: none should favour anything.

    By what is held within the limits, or without any by the mean latency.
    """
    shapes = range(workers.number)
    if traffic.limited:
        return max(shapes, key=lambda prefill_workers: held_per_s(workers, traffic, prefill_workers))
    return min(shapes, key=lambda prefill_workers: mean_latency_s(workers, traffic, prefill_workers))


def _prompt_s(workers: Workers, traffic: Traffic) -> float:
    steps = math.ceil(traffic.computed_tokens / workers.step_tokens)
    return max(SHORTEST_S, steps * workers.model.base_s + _tokens_s(workers.model, traffic))


def _tokens_s(model: StepModel, traffic: Traffic) -> float:
    return model.per_prefill_token_s * traffic.computed_tokens + model.per_attended_token_s * traffic.attended_tokens


def _prefills(workers: Workers, traffic: Traffic, number: int) -> float:
    prompt_s = _prompt_s(workers, traffic)
    may_wait_s = traffic.ttft_limit_s - prompt_s
    if may_wait_s <= 0:
        return 0.0
    return number / prompt_s * min(MOST_USED, 1 / (1 + WAIT * prompt_s / (number * may_wait_s)))


def _step_s(workers: Workers, traffic: Traffic, sequences: float) -> float:
    return workers.model.decode_s(sequences, sequences * traffic.context_tokens)


def _decodes(workers: Workers, traffic: Traffic, number: int) -> float:
    places = number * _fitting(workers, traffic)
    used = places - SPARED * math.sqrt(places)
    if used <= 0:
        return 0.0
    return used / (traffic.output_tokens * max(SHORTEST_S, _step_s(workers, traffic, used / number)))


def _fitting(workers: Workers, traffic: Traffic) -> float:
    """Return the mean number of sequences whose step takes the limit on TPOT; 0 if one alone takes longer.

    Between two numbers it is interpolated: the mean counts, and a place less for a limit that is missed by a hair would
    turn the fleet. Limits are at least what one alone takes (`ridgeline.router.fleet.rebalance.Rebalancer.placed`).
    """
    most = min(workers.places, int(workers.kv_tokens / traffic.context_tokens))
    numbers = range(1, most + 1)
    fitting = bisect_right(numbers, traffic.tpot_limit_s, key=lambda sequences: _step_s(workers, traffic, sequences))
    if fitting in (0, most):
        return fitting
    below_s, above_s = (_step_s(workers, traffic, sequences) for sequences in (fitting, fitting + 1))
    return fitting + max(0.0, (traffic.tpot_limit_s - below_s) / max(SHORTEST_S, above_s - below_s))


def _together(workers: Workers, traffic: Traffic) -> float:
    work_s = max(SHORTEST_S, _tokens_s(workers.model, traffic) + _answer_s(workers.model, traffic))
    return workers.number * _usable(workers, traffic) / work_s


def _gathered(workers: Workers, traffic: Traffic, prefill_workers: int) -> float:
    """Return the rate if answers have gathered on the other workers, which also compute prompts beside them."""
    decode_workers = workers.number - prefill_workers
    prefills, tokens_s = (
        _prefills(workers, traffic, prefill_workers),
        max(SHORTEST_S, _tokens_s(workers.model, traffic)),
    )
    usable = decode_workers * _usable(workers, traffic)
    rate = (prefills * tokens_s + usable) / (tokens_s + _answer_s(workers.model, traffic))
    part_for_prompts = (rate - prefills) * tokens_s / decode_workers
    if tokens_s > part_for_prompts * traffic.ttft_limit_s:
        rate = prefills
    return min(rate, _decodes(workers, traffic, decode_workers))


def _usable(workers: Workers, traffic: Traffic) -> float:
    """Return the part of the longest steps that their base leaves."""
    return max(0.0, 1 - workers.model.base_s / max(SHORTEST_S, _longest_step_s(workers, traffic)))


def _longest_step_s(workers: Workers, traffic: Traffic) -> float:
    model = workers.model
    return min(TPOT_LIMIT_USED * traffic.tpot_limit_s, model.base_s + model.per_prefill_token_s * workers.step_tokens)


def _answer_s(model: StepModel, traffic: Traffic) -> float:
    """Return what an answer adds to the steps that it is in."""
    return traffic.output_tokens * (model.per_sequence_s + model.per_context_token_s * traffic.context_tokens)
