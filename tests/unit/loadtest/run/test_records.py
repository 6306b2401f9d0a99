"""Records on disk."""

import json

from loadtest.run.records import RecordFile, RequestRecord


def test_a_record_is_in_the_file_at_once_and_an_earlier_runs_file_is_kept(tmp_path):
    path = tmp_path / "new" / "records.jsonl"
    RecordFile(path).add(RequestRecord(7, 0.0, 0.0, 10))
    later = RecordFile(path, mode="colocated")
    later.add(RequestRecord(8, 0.0, 0.0, 10))
    (before,) = path.with_name("records.before.jsonl").read_text().splitlines()
    assert json.loads(before)["index"] == 7
    (line,) = path.read_text().splitlines()
    assert {"index": 8, "mode": "colocated"}.items() <= json.loads(line).items()
