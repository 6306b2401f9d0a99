"""How two servers' recorded answers are compared."""

import pytest

from tools.gpu.answers import PROMPTS, SHORTEST_CHARS, Answer, Recording, compare, prompts


def answer(tokens, **tops):
    return Answer(100, list(tokens), [tops.get(token, {token: -0.1}) for token in tokens])


def recording(*answers):
    return Recording("http://server", "model", [1.0], list(answers))


def compared(reference, other):
    return compare(recording(reference), recording(other), 0.25)


def test_answers_with_the_same_tokens_are_equal():
    assert compared(answer("abc"), answer("abc")).equal == [0]


def test_answers_that_part_where_two_tokens_are_about_as_likely_are_a_tie_whatever_follows():
    assert compared(answer("abc", b={"b": -0.7, "x": -0.9}), answer("axyz")).ties == [0]


@pytest.mark.parametrize("tops", [{"b": -0.1, "x": -3.0}, {"b": -0.1}])
def test_answers_that_part_at_an_unlikely_token_differ_and_it_is_said_where(tops):
    [(number, sentence)] = compared(answer("abc", b=tops), answer("axc")).different
    assert (number, "token 1" in sentence) == (0, True)


def test_an_answer_that_ends_early_differs():
    assert [number for number, _ in compared(answer("abc"), answer("ab")).different] == [0]


def test_prompts_are_of_growing_length_and_of_different_text():
    asked = prompts(6_000)
    assert len(asked) == PROMPTS
    assert (len(asked[0]), len(asked[-1])) == (SHORTEST_CHARS, 6_000)
    assert len({prompt[:SHORTEST_CHARS] for prompt in asked}) == PROMPTS
