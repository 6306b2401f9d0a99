"""docs/how-to/operate.md quotes messages as they are said; the tests that produce them ask `tests.support.symptoms`."""

from pathlib import Path

from tests.support.symptoms import is_quoted, quoted

TESTS = Path(__file__).parents[1]


def test_a_message_is_recognised_with_other_numbers_names_and_addresses_and_not_with_other_words():
    assert is_quoted("a deployment named 'mine-2' runs on this Ray cluster already: end it")
    assert is_quoted(
        "3 cores are needed and 1 usable: lower workers or cores_per_worker in pools.prefill or pools.decode, or "
        "raise the container's CPU limit."
    )
    assert not is_quoted("3 cores are wanted and 1 usable")
    assert not is_quoted("")


def test_as_many_places_in_the_tests_ask_as_there_are_messages():
    others = [path for path in TESTS.rglob("test_*.py") if path != Path(__file__)]
    assert sum(path.read_text().count("assert is_quoted(") for path in others) == len(quoted())
