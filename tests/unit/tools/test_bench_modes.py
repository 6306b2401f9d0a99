"""What a round of `tools.bench.modes` counts, and which requests it sends."""

import random

import pytest

from tools.bench.modes import Spec, lengths_of, measured, options

SPEC = Spec("128/128", 0, 0.6, 1.0, "colocated", ttft_slo_s=1.0, tpot_slo_s=0.1)


def test_a_request_is_in_time_if_it_meets_both_slos_and_one_that_failed_is_not():
    told = {
        "ttfts": [0.9, 1.1, 0.9, 0.9],
        "itls": [[0.05, 0.15], [0.05], [0.2], []],
        "errors": ["", "", "", "refused"],
        "start_times": [7.0, 7.5, 8.0, 9.0],
        "duration": 3.0,
        "output_throughput": 2.0,
    }
    now = measured(SPEC, [(128, 128)] * 4, told)
    assert (now.requests, now.failed, now.in_time) == (4, 1, 1)
    assert now.arrival_s == [0.0, 0.5, 1.0, 2.0]
    assert now.longest_gap_s == [0.15, 0.05, 0.2]


def test_turns_are_long_prompts_then_long_answers_then_long_prompts():
    lengths = lengths_of("turns", 9, random.Random())
    assert lengths == [(512, 16)] * 3 + [(64, 96)] * 3 + [(512, 16)] * 3


def test_a_conversation_has_the_lengths_of_the_trace_from_a_random_request_on():
    drawn = lengths_of("conversation", 300, random.Random(1))
    assert len(drawn) == 300
    assert drawn[:100] == drawn[200:], "the trace has 200"
    assert drawn != lengths_of("conversation", 300, random.Random(2))


def test_a_shape_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match="neither IN/OUT, as 512/64, nor conversation nor turns"):
        lengths_of("long", 1, random.Random())


def test_slos_are_given_as_times_of_a_request_alone():
    assert options().parse_args(["--slos", "2.5:1.5,5:2"]).slos == [(2.5, 1.5), (5.0, 2.0)]


def test_requests_may_be_given_by_shape():
    given = options().parse_args(["--requests", "20,1024/24=9"])
    assert given.requests == {"": 20, "1024/24": 9}


def test_a_server_beside_needs_a_name_that_is_no_mode(capsys):
    with pytest.raises(SystemExit):
        options().parse_args(["--beside", "adaptive=http://127.0.0.1:9000"])
    assert "a name that is no mode" in capsys.readouterr().err
