"""Each rank of an engine gets its own share of the worker's cores."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.engine.vllm_workarounds.cores import BIND_VARIABLE, bind_list, cores_of_rank, helpers_on_all_cores_of


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 60))
def test_ranks_get_equal_disjoint_shares_of_all_cores(ranks, share, first):
    cores = tuple(range(first, first + ranks * share))
    shares = [cores_of_rank(bind_list(cores, ranks), rank) for rank in range(ranks)]
    assert [len(mine) for mine in shares] == [share] * ranks
    assert set().union(*shares) == set(cores)


def test_the_list_is_in_vllms_words():
    assert bind_list((4, 5, 8, 9), 2) == "4,5|8,9"


@pytest.mark.parametrize("cores", [(0, 1, 2), (0,), ()])
def test_cores_that_cannot_be_shared_evenly_are_an_error(cores):
    with pytest.raises(ValueError, match="evenly by 2 ranks"):
        bind_list(cores, 2)


@pytest.mark.parametrize("bound", ["nobind", "auto", "", "0-3|4-7"])
def test_a_binding_that_is_not_ours_names_no_cores(bound):
    assert cores_of_rank(bound, 1) == set()


def test_helpers_get_the_ranks_cores_and_the_main_thread_its_own_back(monkeypatch):
    asked = []
    monkeypatch.setenv(BIND_VARIABLE, "2,3|4,5")
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {4})
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: asked.append(cores))
    with helpers_on_all_cores_of(1):
        assert asked == [{4, 5}]
    assert asked == [{4, 5}, {4}]


def test_nothing_is_changed_where_vllm_binds_nothing(monkeypatch):
    monkeypatch.setenv(BIND_VARIABLE, "nobind")
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: pytest.fail("changed"))
    with helpers_on_all_cores_of(0):
        pass
