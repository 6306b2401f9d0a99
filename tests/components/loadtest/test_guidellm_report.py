"""GuideLLM reads the file of its format, and its figures are those of the records."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.export.guidellm_report import write_guidellm_report
from ridgeline.loadtest.export.round_head import RoundHead
from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.run.records import RequestRecord
from tests.support.load_records import a_record

SLO = Slo(ttft_ms=200, tpot_ms=50)
HEAD = RoundHead(datetime(2026, 11, 28, tzinfo=UTC), "colocated", "a model", "openai", 2.0, {"round": "3"})
DONE = [a_record(index, 0.06 * (index + 1), 0.02, output_tokens=11) for index in range(6)]
FAILED = RequestRecord(6, 6.0, 6.0, 100, latency_s=0.4, error="broken")


def test_guidellm_reads_a_variants_rounds_with_the_figures_of_their_records(tmp_path: Path):
    path = tmp_path / "benchmarks.json"
    write_guidellm_report(path, [(HEAD, [*DONE, FAILED]), (HEAD, DONE[:1])], SLO)

    from guidellm.benchmark.schemas import GenerativeBenchmarksReport

    first, second = GenerativeBenchmarksReport.load_file(path).benchmarks
    made = first.metrics.request_totals
    assert (made.successful, made.errored, made.incomplete, made.total) == (6, 1, 0, 7)
    found = first.metrics
    assert found.time_to_first_token_ms.successful.mean == pytest.approx(210, rel=1e-6)
    assert found.inter_token_latency_ms.successful.median == pytest.approx(20, rel=1e-4)
    assert found.request_latency.successful.max == pytest.approx(0.36 + 0.2, rel=1e-4)
    assert (found.prompt_token_count.successful.mean, found.output_token_count.successful.mean) == (100, 11)
    assert found.slo_attainment == pytest.approx(3 / 7)
    assert first.duration == pytest.approx(6.4)
    assert first.config.profile["rate"] == 2.0
    assert second.metrics.request_totals.total == 1


def test_without_guidellm_the_error_says_what_to_install_and_no_folder_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "guidellm.benchmark.schemas", None)
    with pytest.raises(LoadTestError, match="pip install 'guidellm"):
        write_guidellm_report(tmp_path / "guidellm" / "benchmarks.json", [(HEAD, DONE)], SLO)
    assert not list(tmp_path.iterdir()), "no empty folder is left"


def test_no_value_in_the_file_is_not_a_number(tmp_path: Path):
    path = tmp_path / "benchmarks.json"
    write_guidellm_report(path, [(HEAD, [FAILED])], SLO)
    json.loads(path.read_text(), parse_constant=pytest.fail)
