"""Records on disk."""

import json

from ridgeline.loadtest.run.records import RecordFile, RequestRecord


def test_a_record_is_in_the_file_at_once_and_not_glued_to_a_line_that_was_cut(tmp_path):
    path = tmp_path / "new" / "records.jsonl"
    RecordFile(path).add(RequestRecord(7, 0.0, 0.0, 10))
    path.write_bytes(path.read_bytes() + b'{"index"')
    later = RecordFile(path, mode="colocated")
    later.add(RequestRecord(8, 0.0, 0.0, 10))
    before, cut, line = path.read_text().splitlines()
    assert json.loads(before)["index"] == 7
    assert cut == '{"index"'
    assert {"index": 8, "mode": "colocated"}.items() <= json.loads(line).items()
