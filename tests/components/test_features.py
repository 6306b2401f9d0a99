"""The table of features in docs/how-to/serve.md says what tests prove and checks refuse, and nothing else."""

from __future__ import annotations

import pytest

from tests.support.feature_table import PAGE, TABLE, Proof, feature_table, proofs_in

TESTED = """
import pytest

NAMES = {"chat": 1}
MODES = ("colocated", "adaptive")


@pytest.mark.proves(NAMES, MODES)
@pytest.mark.parametrize("one", [pytest.param(1, marks=pytest.mark.proves("beam search", "disaggregated"))])
def test_it(one): ...
"""


def test_the_page_is_what_tests_prove_and_checks_refuse():
    table = TABLE.search(PAGE.read_text())
    assert table is not None
    assert table[0] == feature_table(), "run `python -m tests.support.feature_table` to write it anew"


def test_a_test_proves_what_its_marks_and_those_of_its_parameters_name():
    assert {(proof.feature, proof.column) for proof in proofs_in(TESTED, "it.py")} == {
        ("chat", "colocated"),
        ("chat", "adaptive"),
        ("beam search", "disaggregated"),
    }
    assert {proof.test for proof in proofs_in(TESTED, "it.py")} == {"test_it"}


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("test_it", "helper"),
        ('"chat"', '"chats"'),
        ("MODES = ", "MODE = "),
        ('"disaggregated"', '"somewhere"'),
    ],
    ids=["no test", "no feature", "no such names", "no column"],
)
def test_a_mark_that_could_not_be_true_is_refused(written: str, instead: str):
    with pytest.raises(ValueError, match=r"it\.py|names nothing"):
        list(proofs_in(TESTED.replace(written, instead), "it.py"))


def test_a_cell_cannot_be_refused_and_proven(monkeypatch: pytest.MonkeyPatch):
    both = [Proof("beam search", "adaptive", "tests/it.py", "test_it")]
    monkeypatch.setattr("tests.support.feature_table.proofs", lambda: both)
    with pytest.raises(ValueError, match="beam search, adaptive"):
        feature_table()
