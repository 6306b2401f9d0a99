"""Files that people have: each is read right, or refused with file, line and cause. A case's key is a sentence."""

import gzip
import json

import pytest

from ridgeline.loadtest.errors import TraceError
from ridgeline.loadtest.plan import ReplayPlan
from ridgeline.loadtest.trace.prompts import PromptMaker, TextWindows
from ridgeline.loadtest.trace.readers import load_trace
from ridgeline.loadtest.trace.reading import sharegpt
from ridgeline.loadtest.trace.reading.request_table import NO_TIMES
from ridgeline.loadtest.trace.shape import rows_wanted, shape_trace
from ridgeline.loadtest.trace.trace import TraceRow

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
DAY = "2024-05-10 00:00:0"
AZURE = f"{HEAD}{DAY}0.009930+00:00,2162,5\n{DAY}7+00:00,2399,6\n"
AZURE_ROWS = [(0.0, 2162, 5), (6.99007, 2399, 6)]
PLAIN = f"{HEAD}{DAY}1,10,5\n{DAY}3,20,6\n"
PLAIN_ROWS = [(0.0, 10, 5), (2.0, 20, 6)]
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_TWO = f"{BURST}5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,1087,230,1317,API log\n"
BURST_ROWS = [(0.0, 472, 18), (40.5, 1087, 230)]
ONE = [(0.0, 10, 5)]


def lines(*objects) -> str:
    return "".join(json.dumps(each) + "\n" for each in objects)


def line(at=0, tokens=10, out=5, **more) -> dict:
    return {"timestamp": at, "input_length": tokens, "output_length": out, **more}


def chat(number, at, tokens, out=5, **more) -> dict:
    return {"chat_id": number, "parent_chat_id": -1, "type": "text", "turn": 1, **line(at, tokens, out), **more}


def talk(*texts) -> dict:
    speakers = ("human", "gpt") * len(texts)
    return {"conversations": [{"from": who, "value": text} for who, text in zip(speakers, texts, strict=False)]}


def agent(*calls, **more) -> dict:
    return {"id": "one", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": list(calls), **more}


def call(t, tokens, out, ids=(), **more) -> dict:
    return {"t": t, "type": "n", "in": tokens, "out": out, "hash_ids": list(ids), **more}


MOONCAKE = lines(line(27000, 1100, 500, hash_ids=[0, 1, 2]), line(30000, 600, 20, hash_ids=[0, 9]))
MOONCAKE_ROWS = [(0.0, 1100, 500, (0, 1, 2)), (3.0, 600, 20, (0, 3))]
BAILIAN = lines(chat(159, 61.114, 521, 132, hash_ids=[*range(1, 34)]), chat(160, 61.614, 20, 3, hash_ids=[1, 99]))
BAILIAN_ROWS = [(0.0, 521, 132, tuple(range(33))), (0.5, 20, 3, (0, 33))]
TALKS = [talk("a b c d e", "1 2 3 4"), talk("a b c d", "1 2 3 4 5 6")]
TALK_SIZES = [(5, 4), (4, 6)]
BIG = 2**40

READ = {
    # T1, T2: Azure's times
    "azure 2023 has no zone and seven digits": (
        f"{HEAD}2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
        [(0.0, 374, 44), (4.314579, 396, 109)],
    ),
    "azure 2024 has a zone and leaves out digits of a whole second": (AZURE, AZURE_ROWS),
    "zones are converted": (
        f"{HEAD}2024-05-10T00:00:00.000000+02:00,10,5\n2024-05-09T22:00:01.000000+00:00,20,6\n",
        [(0.0, 10, 5), (1.0, 20, 6)],
    ),
    "Z is UTC": (f"{HEAD}2024-05-10T00:00:00Z,10,5\n2024-05-10T02:00:01.5+02:00,20,6\n", [(0, 10, 5), (1.5, 20, 6)]),
    "mixed digits": (
        f"{HEAD}{DAY}0.5,1,1\n{DAY}0.25,2,2\n{DAY}1.1234567,3,3\n{DAY}2,4,4\n",
        [(0.0, 2, 2), (0.25, 1, 1), (0.873456, 3, 3), (1.75, 4, 4)],
    ),
    "seconds since 1970": (f"{HEAD}1715299200.5,10,5\n1715299202,20,6\n", [(0.0, 10, 5), (1.5, 20, 6)]),
    "an array of requests": (json.dumps([line(), line(2000, 20, 6)]), PLAIN_ROWS),
    "a request over several lines": (json.dumps(line(), indent=1), ONE),
    "BurstGPT with dates": (f"{BURST}{DAY}1,m,10,5,15,x\n{DAY}3,m,20,6,26,x\n", PLAIN_ROWS),
    # BurstGPT
    "BurstGPT": (BURST_TWO, BURST_ROWS),
    "BurstGPT of the second release": (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,x,1.2,GPT-4,10,20,30,API log\n",
        [(0.0, 10, 20)],
    ),
    "BurstGPT with a comma in quotes": (BURST_TWO.replace("API log", '"API, log"'), BURST_ROWS),
    "numbers of tokens as pandas writes them": (f"{HEAD}{DAY}1,10.0,5.0\n{DAY}3,2e1,6\n", PLAIN_ROWS),
    "spaces around cells": (f"{HEAD}{DAY}1 , 10 , 5 \n{DAY}3 , 20, 6\n", PLAIN_ROWS),
    "lengths of 10^12": (f"{HEAD}{DAY}1,1000000000000,5\n", [(0.0, 10**12, 5)]),
    # T8, T10, T17: encodings and ends of lines
    "byte order mark, Azure": ("\ufeff" + AZURE, AZURE_ROWS),
    "byte order mark, Mooncake": ("\ufeff" + MOONCAKE, MOONCAKE_ROWS),
    "CRLF, CSV": (PLAIN.replace("\n", "\r\n"), PLAIN_ROWS),
    "CRLF, Mooncake": (MOONCAKE.replace("\n", "\r\n"), MOONCAKE_ROWS),
    "gzip, Azure": (gzip.compress(AZURE.encode()), AZURE_ROWS),
    "gzip, Mooncake": (gzip.compress(MOONCAKE.encode()), MOONCAKE_ROWS),
    "gzip of two parts": (gzip.compress(HEAD.encode()) + gzip.compress(PLAIN[len(HEAD) :].encode()), PLAIN_ROWS),
    # T9, T11: columns
    "quoted cells": ('"TIMESTAMP","ContextTokens","GeneratedTokens"\n' + f'"{DAY}1","10","5"\n', ONE),
    "another order": (f"ContextTokens,GeneratedTokens,TIMESTAMP\n10,5,{DAY}1\n20,6,{DAY}3\n", PLAIN_ROWS),
    "the index of pandas": (f",{HEAD}0,{DAY}1,10,5\n1,{DAY}3,20,6\n", PLAIN_ROWS),
    "empty lines before the header": ("\n\n" + PLAIN, PLAIN_ROWS),
    "empty lines between rows": (PLAIN.replace("\n", "\n\n"), PLAIN_ROWS),
    "columns beside the known": (f"{HEAD.strip()},note\n{DAY}1,10,5,x\n{DAY}3,20,6,\n", PLAIN_ROWS),
    "rows in disorder": (f"{HEAD}{DAY}3,20,6\n{DAY}1,10,5\n", PLAIN_ROWS),
    # T12, T13: rows of 0 tokens
    "BurstGPT's failures are left out": (f"{BURST}1,m,0,0,0,C\n5,m,10,5,15,C\n6,m,0,18,18,C\n7,m,3,0,3,C\n", ONE),
    "Azure's rows of 0 output tokens are left out": (f"{HEAD}{DAY}0,10,0\n{DAY}1,10,5\n", ONE),
    "Mooncake's rows of 0 output tokens are left out": (lines(line(1, 9, 0), line(5)), ONE),
    "Bailian's rows of 0 prompt tokens are left out": (lines(chat(1, 1.0, 0), chat(2, 1.5, 10)), ONE),
    # Mooncake
    "Mooncake": (MOONCAKE, MOONCAKE_ROWS),
    "Mooncake with empty lines": ("\n\n" + MOONCAKE.replace("\n", "\n\n"), MOONCAKE_ROWS),
    "Mooncake in disorder": (lines(line(3000, 20, 6), line(1000)), PLAIN_ROWS),
    "Mooncake with milliseconds since 1970": (lines(line(1715299200500), line(1715299202500, 20, 6)), PLAIN_ROWS),
    # T3: hashes
    "hashes of 2^40": (
        lines(*(line(1000 * i, 1024, 4, hash_ids=[BIG + 2 * i, BIG + 2 * i + 1]) for i in range(2))),
        [(0.0, 1024, 4, (0, 1)), (1.0, 1024, 4, (2, 3))],
    ),
    "hashes of 128 bits": (
        '{"timestamp":0,"input_length":9,"output_length":5,"hash_ids":["ff0123456789abcdef"]}\n',
        [(0.0, 9, 5, (0,))],
    ),
    "hashes are numbered as they come": (
        lines(line(0, 600, 5, hash_ids=[9, 4]), line(1, 600, 5, hash_ids=[4, 9])),
        [(0.0, 600, 5, (0, 1)), (0.001, 600, 5, (1, 0))],
    ),
    # T4: Bailian
    "Bailian has seconds and blocks of 16 tokens": (BAILIAN, BAILIAN_ROWS),
    "a later turn of Bailian is a request of its own": (
        lines(chat(1, 1.0, 16, hash_ids=[5]), chat(2, 3.0, 32, hash_ids=[5, 6], parent_chat_id=1, turn=2)),
        [(0.0, 16, 5, (0,)), (2.0, 32, 5, (0, 1))],
    ),
    # T15: sessions
    "sessions grow by question and answer": (
        lines(
            line(1000, 30, 5, session_id="a"),
            {"session_id": "a", "delay": 2500, "input_length": 10, "output_length": 7},
        ),
        [TraceRow(0.0, 30, 5, session="a"), TraceRow(0.0, 45, 7, session="a", think_s=2.5, after=(0,))],
    ),
    "a later turn with a time of its own is not sent before": (
        lines(line(0, 30, 5, session_id="a"), line(60_000, 10, 7, session_id="a")),
        [TraceRow(0.0, 30, 5, session="a"), TraceRow(0.0, 45, 7, session="a", offset_s=60.0, after=(0,))],
    ),
    "a later turn may have both time and delay": (
        lines(line(500, 30, 5, session_id="a"), line(1500, 10, 7, session_id="a", delay=250)),
        [TraceRow(0.0, 30, 5, session="a"), TraceRow(0.0, 45, 7, session="a", think_s=0.25, offset_s=1.0, after=(0,))],
    ),
    "a session's hashes are kept": (
        lines(line(0, 600, 5, session_id="a", hash_ids=[8, 9]), line(9, 512, 5, session_id="b", hash_ids=[8])),
        [TraceRow(0.0, 600, 5, (0, 1), "a"), TraceRow(0.009, 512, 5, (0,), "b")],
    ),
    "sessions may begin after requests without one": (
        lines(line(0), line(1000, 20, 6), line(2000, 30, 7, session_id="a")),
        [TraceRow(0.0, 10, 5), TraceRow(1.0, 20, 6), TraceRow(2.0, 30, 7, session="a")],
    ),
    # WEKA
}

NOTED = {
    "0 output tokens are told": (f"{BURST}1,m,3,0,3,C\n5,m,10,5,15,C\n", "1 of 2 requests dropped: 0 output tokens"),
    "0 prompt tokens are told": (f"{BURST}1,m,0,9,9,C\n5,m,10,5,15,C\n", "1 of 2 requests dropped: 0 prompt tokens"),
    "too few hashes are told": (
        lines(line(0, 2000, 8, hash_ids=[1]), line(0, 20, 3, hash_ids=[1, 2, 3])),
        "2 of 2 requests have not the hash_ids of their length, at 512 tokens each: line 1 has 1 for 2000 tokens",
    ),
    "too many hashes are told": (
        lines(line(), line(0, 20, 8, hash_ids=[1, 2, 3]), line(0, 600, 8, hash_ids=[1, 2])),
        "line 2 has 3 for 20 tokens",
    ),
    "Bailian's blocks under Mooncake's keys are told": (
        lines(line(61.114, 521, hash_ids=[*range(33)]), line(70, 33, hash_ids=[1, 2, 3])),
        "blocks of 16 tokens, as lengths and hash_ids agree on; 512 is usual",
    ),
    "ticks are told": (lines(*(line(3000 * (i // 8)) for i in range(40))), "ticks of about 3.00 s"),
}

REFUSED = {
    # T6
    "nan as a later time": (BURST_TWO + "nan,ChatGPT,472,18,490,C\n", 4, "mend or remove the row"),
    "nan as tokens": (BURST_TWO + "50,ChatGPT,nan,18,490,C\n", 4, "mend or remove the row"),
    "NaN in JSON": (MOONCAKE + '{"timestamp":NaN,"input_length":1,"output_length":1}\n', 3, "JSON is malformed"),
    "a number too large for JSON": ('{"timestamp":1e999,"input_length":1,"output_length":1}\n', 1, "out of range"),
    # T7
    "a cell of 200,000 digits, Azure": (HEAD + "9" * 200_000 + ",10,5\n", 2, "mend or remove the row"),
    # Cells
    "words as tokens": (PLAIN + f"{DAY}5,many,3\n", 4, "mend or remove the row"),
    "a part of a token": (PLAIN + f"{DAY}5,1.5,3\n", 4, "mend or remove the row"),
    "a comma for thousands": (PLAIN + f"{DAY}5,1,234,3\n", None, "mend the file"),
    "negative tokens, CSV": (PLAIN + f"{DAY}5,-7,3\n", 4, "mend or remove the row"),
    "negative tokens, JSON": (MOONCAKE + lines(line(0, 9, -3)), 3, "a negative length"),
    "tokens beyond 2^53": (f"{HEAD}{DAY}1,1{'0' * 20},5\n", 2, "mend or remove the row"),
    "tokens beyond 2^53 in JSON": (lines(line(0, 10**17)), 1, "a length of more than 2^53 tokens"),
    "a missing cell": (PLAIN + f"{DAY}5,5\n", 4, "mend or remove the row"),
    "an empty cell": (PLAIN + f"{DAY}5,,5\n", 4, "mend or remove the row"),
    "a last line that is cut off": (PLAIN + "2024-05-10 00:0", 4, "mend or remove the row"),
    "NUL in a number": (PLAIN + f"{DAY}5,1\0,5\n", 4, "mend or remove the row"),
    "a zone in one row only": (PLAIN + f"{DAY}5+00:00,1,5\n", 4, "mend or remove the row"),
    "a quote that is never closed": (PLAIN + f'"{DAY}5,1,5\n', None, "could not parse"),
    "a gzip file's line": (gzip.compress(f"{PLAIN}{DAY}5,x,5\n".encode()), 4, "mend or remove the row"),
    "a quote inside a cell": (BURST_TWO + '6,m"x,1,2,3,C\n', None, "mend the file"),
    "seconds and milliseconds": (
        f"{BURST}5,m,1,1,2,C\n1715299200500,m,1,1,2,C\n",
        None,
        "years from the first",
    ),
    "dates of another age": (PLAIN + "0001-01-01 00:00:00,1,1\n", None, "2.02e+03 years from the first arrival"),
    "endless times in JSON": (
        '{"timestamp":1e308,"input_length":1,"output_length":1}\n' + lines(line()),
        None,
        "years",
    ),
    "brackets without end": (MOONCAKE + '{"timestamp":1,"x":' + "[" * 100_000 + "}\n", 3, "recursion"),
    "turns whose sums cannot be": (lines(line(0, 2**53, 5, session_id=1), line(0, 9, 5, session_id=1)), 2, "2^53"),
    "a WEKA call of 10^23 tokens": (lines(agent(call(0, 10**23, 9))), 1, "a length of more than 2^53 tokens"),
    "WEKA's blocks of no tokens": (lines(agent(call(0, 9, 9), block_size=0)), 1, "block_size is 0"),
    "WEKA's subagents without end": (
        '{"block_size":64,"requests":' + '[{"t":1,"type":"subagent","requests":' * 9999,
        1,
        "recursion",
    ),
    # Files
    "an empty file": ("", None, "holds no request: it is empty"),
    "a header alone": (HEAD, None, "holds no request"),
    "rows that had all failed": (f"{HEAD}{DAY}1,10,0\n", None, "holds no request (1 dropped: 0 output tokens"),
    "no header": (PLAIN[len(HEAD) :], 1, "begins none of the formats that are read: Azure CSV (columns TIMESTAMP"),
    "words": ("\nhello\n", 2, "'hello' begins none of the formats that are read"),
    "a CSV of other columns": ("a,b,c\n1,2,3\n", 1, "'a,b,c' begins none of the formats"),
    "an empty array": ("[]", 1, "begins none of the formats that are read: Azure CSV"),
    "objects with other keys": ('{"a": 1}\n', 1, "begins none of the formats that are read"),
    "bytes that are not UTF-8, CSV": (PLAIN.encode() + b"2024,1,\xff\n", 4, "byte 0xff is not UTF-8: save the file as"),
    "bytes that are not UTF-8, JSON": (MOONCAKE.encode() + b'{"\xe9": 1}\n', 3, "byte 0xe9 is not UTF-8"),
    "a gzip file that is cut off": (gzip.compress(AZURE.encode())[:-20], None, "is a damaged gzip file"),
    "a gzip file that is altered": (gzip.compress(AZURE.encode())[:20] + b"\0" * 20, None, "is a damaged gzip file"),
    "Parquet": (b"PAR1....", None, "is a Parquet file: write it as CSV"),
    "Zstandard": (b"\x28\xb5\x2f\xfd....", None, "compressed by zstd: unpack it, or compress it by gzip"),
    "milliseconds since 1970": (f"{HEAD}1715299200500,10,5\n", None, "TIMESTAMP is not in seconds"),
    "zip or Excel": (b"PK\x03\x04....", None, "a zip archive or an Excel file"),
    "bzip2": (b"BZh91AY", None, "compressed by bzip2: unpack it"),
    "xz": (b"\xfd7zXZ\0", None, "compressed by xz: unpack it"),
    "a pointer of Git LFS": (b"version https://git-lfs.github.com/spec/v1\n", None, "run git lfs pull"),
    # JSON lines
    "a line that is no JSON": (MOONCAKE + "nonsense\n", 3, "JSON is malformed"),
    "a last line of JSON that is cut off": (MOONCAKE + '{"timestamp": 1, "inp', 3, "Input data was truncated"),
    "a line without lengths": (MOONCAKE + '{"timestamp": 1}\n', 3, "missing required field `input_length`"),
    "a line without a time": (MOONCAKE + lines({"input_length": 1, "output_length": 1}), 3, "no timestamp: give one"),
    "a time that is text": (MOONCAKE + lines(line("2024-05-10")), 3, "Expected `float | null`, got `str`"),
    "a length that is text": (MOONCAKE + lines(line(0, "10")), 3, "Expected `int`, got `str` - at `$.input_length`"),
    "hashes that are no list": (MOONCAKE + lines(line(hash_ids=5)), 3, "at `$.hash_ids`"),
    # Sessions
    "a session's first turn without a time": (
        lines(line(session_id="a"), {"session_id": "b", "input_length": 1, "output_length": 1}),
        2,
        "the first turn of session b needs a timestamp",
    ),
    "a negative delay": (lines(line(session_id="a"), line(session_id="a", delay=-1)), 2, "its delay is 0 or more"),
    "a delay that outlasts any run": (
        lines(line(session_id="a"), line(session_id="a", delay=1e300)),
        2,
        "a delay of 1e+297 s: give milliseconds, of a day (86400000) at most",
    ),
    "a later turn years away": (
        lines(line(session_id="a"), line(1e300, session_id="a")),
        None,
        "years from the first arrival to the last",
    ),
    "a turn that adds nothing": (lines(line(0, 0, 5, session_id="a")), 1, "at least 1 input and 1 output token"),
    "turns in disorder": (
        lines(line(5000, session_id="a"), line(1000, session_id="a")),
        2,
        "this turn of session a is earlier than the one before: sort them",
    ),
    # WEKA
    "blocks of two sizes": (
        lines(agent(call(0, 64, 9)), agent(call(0, 64, 9), block_size=16)),
        None,
        "blocks of 16, 64 tokens",
    ),
    "a WEKA call without a time": (lines(agent({"type": "n", "in": 1, "out": 1})), 1, "missing required field `t`"),
    "a WEKA object that is cut off": (json.dumps(agent(call(0, 64, 9)), indent=1)[:-9], 14, "truncated"),
}


def a_file(folder, content) -> str:
    path = folder / "trace"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def rows_of(expected) -> list[TraceRow]:
    return [each if isinstance(each, TraceRow) else TraceRow(*each) for each in expected]


def assert_rows(found, expected):
    wanted = rows_of(expected)
    assert [row.arrival_s for row in found] == pytest.approx([row.arrival_s for row in wanted], abs=1e-9)
    plain = [(row.input_tokens, row.output_tokens, row.prefix_ids, row.session) for row in found]
    assert plain == [(row.input_tokens, row.output_tokens, row.prefix_ids, row.session) for row in wanted]
    later = [(row.think_s, row.offset_s, row.after, row.fresh) for row in found]
    assert later == [(row.think_s, row.offset_s, row.after, row.fresh) for row in wanted]


@pytest.mark.parametrize("sentence", READ)
def test_a_file_is_read_right(tmp_path, sentence):
    content, expected = READ[sentence]
    assert_rows(load_trace(a_file(tmp_path, content)).rows, expected)


@pytest.mark.parametrize("sentence", NOTED)
def test_what_is_not_as_it_should_be_is_told(tmp_path, sentence):
    content, note = NOTED[sentence]
    assert any(note in each for each in load_trace(a_file(tmp_path, content)).notes)


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_file_is_refused_with_its_line_and_the_cause(tmp_path, sentence):
    content, number, cause = REFUSED[sentence]
    name = a_file(tmp_path, content)
    with pytest.raises(TraceError) as caught:
        load_trace(name)
    assert cause in str(caught.value)
    assert f"{name}, line {number}: " in str(caught.value) if number else name in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        load_trace(str(tmp_path))


def test_a_file_name_with_an_asterisk_is_no_pattern(tmp_path):
    (tmp_path / "a*.csv").write_text(PLAIN)
    (tmp_path / "ab.csv").write_text("x,y\n")
    assert_rows(load_trace(str(tmp_path / "a*.csv")).rows, PLAIN_ROWS)


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(TALKS),
        json.dumps(TALKS, indent=1),
        "\ufeff" + json.dumps(TALKS),
        lines(*TALKS),
        gzip.compress(json.dumps(TALKS).encode()),
        gzip.compress(lines(*TALKS).encode()),
    ],
    ids=["array", "array over lines", "byte order mark", "JSONL", "gzip", "gzip of JSONL"],
)
def test_sharegpt_is_read_as_an_array_and_as_lines(tmp_path, content):
    trace = load_trace(a_file(tmp_path, content), "words")
    assert [(row.input_tokens, row.output_tokens) for row in trace.rows] == TALK_SIZES
    assert trace.notes == (NO_TIMES,)


@pytest.mark.parametrize("as_lines", [False, True])
def test_one_bad_conversation_is_left_out_and_counted(tmp_path, as_lines):
    bad = [{"conversations": None}, {"conversations": [{"from": "human", "value": None}]}, {"text": 1}]
    others = [talk("a b c d", "1 2"), talk("a b c d"), {"conversations": []}]
    found = [*bad, *TALKS, *others]
    content = lines(*found) if as_lines else json.dumps(found)
    content += content and '{"conversations":[{"from":"human","value":"\\ud800"}]}\n' * as_lines
    trace = load_trace(a_file(tmp_path, content), "words")
    assert [(row.input_tokens, row.output_tokens) for row in trace.rows] == TALK_SIZES
    read = 8 + as_lines
    assert set(trace.notes[1:]) == {
        f"{3 + as_lines} of {read} requests dropped: conversations that are not lists of messages with from and value",
        f"2 of {read} requests dropped: conversations that do not begin with a question and its answer",
        f"1 of {read} requests dropped: questions or answers of fewer than 4 tokens",
    }


def test_an_array_that_is_cut_off_names_its_line(tmp_path):
    name = a_file(tmp_path, json.dumps(TALKS, indent=1)[:-9])
    with pytest.raises(TraceError, match="line 23: Input data was truncated"):
        load_trace(name, "words")


def test_sharegpt_with_a_limit_is_not_tokenised_beyond(tmp_path, tokenised):
    name = a_file(tmp_path, lines(*TALKS * 2000))
    assert len(load_trace(name, "words", 10).rows) == 10
    assert len(tokenised) == 2 * sharegpt.BATCH


@pytest.mark.parametrize(
    "spec", ["rate=nan", "rate=inf", "n=nan", "n=0", "n=1.5", "input=-1", "rate=0", "rate=-1", "rate=x", "speed=2"]
)
def test_a_poisson_trace_of_no_numbers_is_refused(spec):
    with pytest.raises(TraceError, match=f"the trace 'poisson:{spec}' is not understood"):
        load_trace(f"poisson:{spec}")


def test_blocks_of_16_tokens_differ_however_many_there_are():
    windows = TextWindows(tuple(range(1000)), 3)
    ordinals = [*range(3000), *range(10**6, 10**6 + 3000), *range(5 * 10**8, 5 * 10**8 + 3000)]
    assert len({tuple(windows.window(ordinal, 16)) for ordinal in ordinals}) == 9000


def test_a_turn_of_a_session_has_its_shared_blocks_where_its_own_tokens_begin(tmp_path):
    turns = (
        line(0, 600, 8, session_id="a", hash_ids=[70, 71]),
        line(5, 600, 8, session_id="b", hash_ids=[70, 72]),
        line(9, 512, 8, session_id="a", hash_ids=[90]),
        line(9, 512, 8, session_id="b", hash_ids=[90]),
    )
    trace = load_trace(a_file(tmp_path, lines(*turns)))
    maker = PromptMaker(TextWindows(tuple(range(5000)), 1), trace, 0)
    first_a, later_a, first_b, later_b = (maker.prompt(index, 0) for index in range(4))
    assert [len(each) for each in (first_a, later_a, first_b, later_b)] == [600, 1120, 600, 1120]
    assert first_a[:512] == first_b[:512]
    assert first_a[512:] != first_b[512:]
    assert later_a[:600] == first_a
    assert later_a[608:] == later_b[608:]
    assert later_a[600:608] != later_b[600:608]


def test_a_limit_reads_no_more_of_a_large_file_than_it_takes(tmp_path):
    rows = [f"{second},10,{5 + second % 3}" for second in range(40_000)]
    name = a_file(tmp_path, HEAD + "\n".join([*rows, "nonsense"]))
    with pytest.raises(TraceError, match="line 40002"):
        load_trace(name)
    plan = ReplayPlan(trace=name, limit=7)
    trace = load_trace(name, limit=rows_wanted(plan))
    assert "no more than the first 30,000 rows of the file were read" in trace.notes
    assert_rows(shape_trace(trace, plan).rows, [(float(second), 10, 5 + second % 3) for second in range(7)])


def test_a_limit_reads_all_sessions_since_their_later_turns_may_be_anywhere(tmp_path):
    first, later = line(0, session_id="a"), line(99_000, session_id="a")
    name = a_file(tmp_path, lines(first, *(line(at) for at in range(1, 30_001)), later))
    trace = load_trace(name, limit=2)
    assert [row.session for row in trace.rows[:2]] == ["a", "a"]
    assert trace.notes == ()


def test_a_limit_that_others_are_dropped_for_reads_the_whole_file():
    for changes in ({"too_long": "drop", "max_input_tokens": 9}, {"spread_ticks": True}, {"jitter_s": 1.0}):
        assert rows_wanted(ReplayPlan(limit=7, **changes)) is None


def test_a_small_file_in_disorder_is_sorted_before_the_limit(tmp_path):
    name = a_file(tmp_path, HEAD + "".join(f"{100 - second},10,{second + 1}\n" for second in range(100)))
    trace = load_trace(name, limit=2)
    assert [row.output_tokens for row in trace.rows[:2]] == [100, 99]


def test_a_file_that_has_changed_is_read_again(tmp_path):
    name = a_file(tmp_path, PLAIN)
    assert len(load_trace(name).rows) == 2
    a_file(tmp_path, PLAIN + f"{DAY}9,1,1\n")
    assert len(load_trace(name).rows) == 3
