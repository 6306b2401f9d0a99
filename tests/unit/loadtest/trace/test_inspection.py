"""What `ridgeline trace inspect` says of a trace: lengths, arrivals, burstiness, prefix reuse."""

import json

import pytest

from ridgeline.cluster.commands.inspect_trace import facts, length_rows
from ridgeline.loadtest.trace.inspection import TraceFigures, inspect_trace


def inspected(folder, *requests, limit=None) -> TraceFigures:
    path = folder / "trace"
    path.write_text("".join(json.dumps(each) + "\n" for each in requests))
    return inspect_trace(str(path), limit=limit)


def line(at_s=0.0, tokens=10, out=5, **more) -> dict:
    return {"timestamp": 1000 * at_s, "input_length": tokens, "output_length": out, **more}


def test_lengths_have_their_mean_total_and_percentiles(tmp_path):
    figures = inspected(tmp_path, *(line(tokens=tokens, out=2 * tokens) for tokens in range(1, 102)))
    prompts, outputs = figures.lengths.values()
    assert (prompts.mean, prompts.total) == (51, 5151)
    assert [prompts.at(level) for level in (0, 0.1, 0.5, 0.9, 0.99, 1)] == [1, 11, 51, 91, 100, 101]
    assert (outputs.mean, outputs.at(0.5)) == (102, 102)
    assert length_rows(figures)[0] == ["prompt tokens", "51", "11", "51", "91", "100", "101", "5,151"]


def test_regular_arrivals_have_no_variation(tmp_path):
    arrivals = inspected(tmp_path, *(line(at / 2) for at in range(201))).arrivals
    assert (arrivals.duration_s, arrivals.mean_rate, arrivals.peak_rate) == (100, 2, 2)
    assert arrivals.cv_of_gaps == pytest.approx(0)
    assert arrivals.dispersion == {1: pytest.approx(0), 60: None}


def test_poisson_arrivals_have_1_of_each_figure():
    arrivals = inspect_trace("poisson:rate=5,n=20000,seed=1").arrivals
    assert arrivals.mean_rate == pytest.approx(5, rel=0.05)
    assert arrivals.cv_of_gaps == pytest.approx(1, abs=0.05)
    assert list(arrivals.dispersion.values()) == [pytest.approx(1, abs=0.4)] * 2


def test_bursts_have_more(tmp_path):
    arrivals = inspected(tmp_path, *(line(10 * (at // 10)) for at in range(400))).arrivals
    assert arrivals.peak_rate == 10
    assert arrivals.cv_of_gaps == pytest.approx(3, abs=0.1)
    assert arrivals.dispersion[1] == pytest.approx(9, abs=0.1)


@pytest.mark.parametrize("requests", [1, 2, 5])
def test_arrivals_all_at_once_have_no_rate(tmp_path, requests):
    figures = inspected(tmp_path, *[line(3)] * requests)
    assert (figures.arrivals.mean_rate, figures.arrivals.cv_of_gaps) == (None, None)
    said = dict(facts(figures))
    assert said["arrivals"] == f"over 0 s, all at once, peak {requests} in a second"
    assert said["burstiness"] == "too few arrivals to tell"


def test_reuse_is_what_earlier_prompts_began_with(tmp_path):
    requests = [
        line(0, 1100, hash_ids=[1, 2, 3]),
        line(1, 1500, hash_ids=[1, 2, 4]),
        line(2, 600, hash_ids=[9, 2]),
        line(3, 700, hash_ids=[1, 2]),
    ]
    figures = inspected(tmp_path, *requests)
    assert figures.reuse == pytest.approx((1024 + 0 + 700) / 3900)
    assert (
        dict(facts(figures))["prefix reuse"]
        == "44.2% of prompt tokens were in an earlier prompt (blocks of 512 tokens)"
    )


def test_a_session_reuses_its_earlier_prompt(tmp_path):
    turns = [line(0, 100, 20, session_id="a"), line(5, 30, 5, session_id="a"), line(1, 50, 5, session_id="b")]
    figures = inspected(tmp_path, *turns)
    assert (figures.format, figures.requests, len(figures.sessions.requests.values)) == ("sessions JSONL", 3, 2)
    assert figures.arrivals.duration_s == 1
    assert figures.reuse == pytest.approx(100 / (100 + 150 + 50))
    assert facts(figures)[0] == ("sessions", "2, with 1.5 requests each, 2 at most; arrivals are first turns")


def test_reuse_is_unknown_without_hashes_and_sessions(tmp_path):
    assert inspected(tmp_path, line()).reuse is None
    assert inspect_trace("demo").reuse is None


def test_what_was_left_out_is_told_by_reason(tmp_path):
    figures = inspected(tmp_path, line(), line(out=0), line(out=0), line(tokens=0))
    assert figures.notes == (
        "2 of 4 requests dropped: 0 output tokens, so they had failed when recorded",
        "1 of 4 requests dropped: 0 prompt tokens",
    )


def test_a_limit_takes_the_first_requests(tmp_path):
    figures = inspected(tmp_path, *(line(at, 10 + at) for at in range(9)), limit=3)
    assert (figures.requests, figures.lengths["prompt tokens"].total, figures.arrivals.duration_s) == (3, 33, 2)


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "5 s"), (300, "5.0 min"), (3 * 3600, "3.0 h"), (7 * 86_400, "7.0 days")]
)
def test_times_are_told_in_fitting_units(tmp_path, seconds, text):
    assert dict(facts(inspected(tmp_path, line(), line(seconds))))["arrivals"].startswith(f"over {text}, mean")
