"""Which unit tests `make check` runs for a change."""

from tools.changed_tests import STRUCTURE, unit_tests_of

ROUTE = "tests/unit/router/fleet/test_request_route.py"


def test_a_module_is_tested_by_its_mirror_and_by_whoever_imports_it():
    found = unit_tests_of(["router/fleet/request_route.py"])
    assert {ROUTE, STRUCTURE, "tests/unit/router/placement/test_cluster_state.py"} <= set(found)
    assert "tests/unit/roofline/test_cost.py" not in found


def test_a_changed_test_is_run_and_one_that_was_removed_is_not():
    assert unit_tests_of([ROUTE, "tests/unit/test_nothing.py"]) == [ROUTE]


def test_what_tests_share_runs_the_tests_that_import_it():
    assert "tests/unit/router/placement/test_choice.py" in unit_tests_of(["tests/support/samples.py"])


def test_documents_are_checked_and_other_files_run_nothing():
    assert "tests/unit/test_docs.py" in unit_tests_of(["docs/index.md"])
    assert unit_tests_of(["deploy/setup.sh", "tests/engines/test_api.py"]) == []


def test_for_one_file_only_its_own_tests_are_run():
    assert STRUCTURE not in unit_tests_of(["router/fleet/request_route.py"], with_layout=False)
