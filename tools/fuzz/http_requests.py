"""Malformed HTTP requests: how they are generated and sent, and what every answer must look like.

A request starts from a valid body of one of the routes. Fields are replaced by values that could break something, the
JSON text may be damaged, and headers and framing may be wrong. Some requests are not HTTP at all.
"""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from ridgeline.router.front.request_fields import APIS, FOREIGN, INSTEAD
from tools.fuzz.damage import bent, trees

DEADLINE_S = 120.0
LARGEST_ANSWER_BYTES = 1 << 20

# --- the values

_TEXT = {"model": "fuzzed", "prompt": "one two three four five", "max_tokens": 4}
_CHAT = {"model": "fuzzed", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": _TEXT,
    "/v1/chat/completions": _CHAT,
    "/v1/responses": {"model": "fuzzed", "input": "hello there", "max_output_tokens": 4},
    "/v1/messages": _CHAT,
    "/v1/chat/completions/batch": _CHAT | {"messages": [_CHAT["messages"]]},
    "/v1/messages/count_tokens": _CHAT,
    "/tokenize": {"model": "fuzzed", "prompt": "one two"},
    "/detokenize": {"model": "fuzzed", "tokens": [1, 2, 3]},
    "/invocations": _CHAT,
    "/generative_scoring": {"model": "fuzzed", "query": "a", "items": ["b"], "label_token_ids": [1, 2]},
    "/v1/systemone": _CHAT,
    "/scale_elastic_ep": {"model": "fuzzed"},
}
MOST_USED = list(VALID)[:4]


def nested(depth: int, kind: str) -> Any:
    """Return lists or objects nested to this depth."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


_SCALARS: list[Any] = [
    *(None, True, False, [], {}, 0, -1, 256, 257, 49151, 49152, 2**31, 2**53, 2**63, -(2**63) - 1, 2**64, 10**400),
    *(
        0.0,
        -1.5,
        1e-310,
        1e308,
        float("nan"),
        float("inf"),
        float("-inf"),
        "",
        "\0",
        "\ud800",
        "\udfff\ud800",
        "\ufeff",
    ),
    *("a" * 20_000, "fuzzed", "auto", "none", "required", "json_object", "../../etc/passwd", "http://127.0.0.1:1/"),
    *("<|im_start|>", "<|endoftext|>" * 50, "{{ 1/0 }}", "{% for i in range(10**9) %}{% endfor %}", "%s%n", "-1"),
    *("user", "assistant", "tool", "function", "text", "image_url", "thinking", "data:image/png;base64,AAAA"),
]
_REGEXES = [
    *("(a+)+$", "(a|a)*b", "(" * 200 + "a" + ")" * 200, "a{1,100000}", "(a{1,1000}){1,1000}", "[", "(?<=a)b", r"\1"),
    *("", "(?R)", "[^\\0-\uffff]", "a{,}", ".*" * 100, r"\p{L}+", "^$", "\ud800", "(?:" * 5000, "x" * 5000),
]
_RECURSIVE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
_SCHEMAS = [
    *({}, True, False, None, [], "x", 7, {"type": "nothing"}, {"type": ["object", "null"]}, {"type": 7}, {"$ref": "#"}),
    _RECURSIVE,
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}},
    {"$ref": "http://127.0.0.1:1/schema.json"},
    {"$ref": "file:///etc/passwd"},
    {"type": "array", "minItems": 10**9, "items": {"type": "string"}},
    {"type": "array", "minItems": -1, "maxItems": 2**64},
    {"type": "string", "pattern": "(a+)+$"},
    {"type": "string", "pattern": "["},
    {"type": "string", "minLength": 10**12},
    {"type": "integer", "minimum": 1e400, "maximum": -(2**70)},
    {"type": "number", "multipleOf": 0},
    *({"enum": []}, {"enum": [nested(100, "list")]}, {"not": {}}, {"anyOf": []}, {"allOf": [{"$ref": "#"}]}),
    {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}},
    {"type": "object", "properties": {"\ud800": {"type": "string"}, "": {}}},
    {"type": "object", "patternProperties": {"(": {}}, "additionalProperties": {"$ref": "#"}},
    nested(300, "dict"),
]
_GRAMMARS = ["", "root ::= root", 'root ::= "a', "root ::= " + "(" * 500, "start: start", "\0", 'root ::= ("a"*)*', "a"]


_schema = st.sampled_from(_SCHEMAS)
_scalar: st.SearchStrategy[Any] = st.one_of(st.sampled_from(_SCALARS), st.integers(), st.floats(), st.text(max_size=20))
FIELDS = sorted({name for model in APIS.values() for name in model.model_fields})
_names = st.sampled_from([*FIELDS, *FOREIGN, *INSTEAD, "type", "function", "role", "content", "a", ""])
_json = st.recursive(
    _scalar,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_names, inner, max_size=4)),
    max_leaves=12,
)
_handoff = {"do_remote_prefill": True, "handoff": {"handoff_id": "x", "addresses": ["127.0.0.1:1"]}}
_HOSTILE: dict[str, st.SearchStrategy[Any]] = {
    "structured_outputs": st.one_of(
        st.fixed_dictionaries({"json": _schema}),
        st.fixed_dictionaries({"regex": st.sampled_from(_REGEXES)}),
        st.fixed_dictionaries({"grammar": st.sampled_from(_GRAMMARS)}),
        st.just({"structural_tag": '{"type": "structural_tag"}'}),
    ),
    "response_format": _schema.map(lambda each: {"type": "json_schema", "json_schema": {"name": "a", "schema": each}}),
    "text": _schema.map(lambda each: {"format": {"type": "json_schema", "name": "a", "schema": each}}),
    "tools": _schema.map(lambda each: [{"type": "function", "function": {"name": "f", "parameters": each}}]),
    "prompt": st.lists(st.sampled_from([1, 49151, 49152, 2**31, 2**64, -1]) | st.text(max_size=3), max_size=6),
    **dict.fromkeys(
        ("kv_transfer_params", "vllm_xargs"), st.just({"kv_transfer_params": _handoff}) | st.just(_handoff)
    ),
}
"""What grammars and hand-offs may be told; other fields get any JSON, and schemathesis knows their types."""


@st.composite
def bodies(draw: st.DrawFn, path: str) -> Any:
    """Draw a valid body for this route with some fields added, then changed in up to three places."""
    body = dict(VALID[path])
    for name in draw(st.lists(st.sampled_from(FIELDS) | st.sampled_from(list(_HOSTILE)), max_size=2, unique=True)):
        body[name] = draw(_HOSTILE.get(name, _json))
    if draw(st.integers(0, 3)) == 0:
        body["stream"] = True
    return draw(trees(body, _json))


# --- how requests are written and sent


@dataclass(frozen=True)
class RawRequest:
    """Bytes for one connection, and whether a server that reads them must answer."""

    data: bytes
    must_answer: bool = True


_HOSTILE_BYTES = [
    *(b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\0", b"\\u0000", b"\\ud800", b'"', b"}", b",", b"1e999", b"\\"),
]
_CONTENT_TYPES = [
    *(b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x", b"", b"application/"),
    *(b"application/json; charset=utf-7", b"application/json; charset=\xff", b"APPLICATION/JSON", b"x" * 3000),
]
_HEADERS = [
    *(b"X-Request-Id: " + b"x" * 5000, b"X-Request-Id: \xff\xfe", b"X-Request-Id: ", b"Authorization: Bearer \xc3\x28"),
    *(b"Accept: \xff", b"Accept-Encoding: br;q=\x80", b"Cookie: " + b"a=b;" * 1000, b"Host: \xff", b"Host: a b"),
    *(b"traceparent: 00-x", b"X-data-parallel-rank: -1", b"X-data-parallel-rank: x", b"Expect: 100-continue"),
    *(b"Content-Encoding: gzip", b"Upgrade: websocket\r\nConnection: upgrade", b"Upgrade: h2c", b"Origin: null"),
    *(b"X-Ridgeline-TTFT-ms: nan", b"X-Ridgeline-TPOT-ms: 1e-400", b"X-Ridgeline-Timeout-s: \xff"),
    *(b"X-Session-ID: \0", b"bad header", b": empty", b"a" * 70000 + b": b", b"X-Forwarded-For: " + b"1," * 2000),
]
_CHUNKED_GARBAGE = [b"zz\r\nabc", b"-1\r\n", b"f" * 40 + b"\r\n", b"5\r\nab", b"\r\n\r\n", b"3;x=\xff\r\n"]


@st.composite
def body_bytes(draw: st.DrawFn, path: str) -> bytes:
    """Draw JSON text, damaged or not."""
    text = json.dumps(draw(bodies(path))).encode()
    if draw(st.integers(0, 3)):
        return text
    depth, digits = draw(st.sampled_from([500, 50_000])), draw(st.sampled_from([20, 5000]))
    others = [text.decode().encode("utf-16"), text.replace(b"e", b"\xe9"), b"\xef\xbb\xbf" + text]
    others += [b"[" * depth, b'{"a":' * depth, b'{"prompt":[' * depth, text.replace(b"4", b"9" * digits)]
    return draw(st.one_of(bent(text, _HOSTILE_BYTES), st.sampled_from(others)))


@st.composite
def posts(draw: st.DrawFn) -> RawRequest:
    """Draw an HTTP request of a client that knows the route, with correct or wrong framing."""
    path = draw(st.sampled_from([*MOST_USED * 4, *VALID]))
    body = draw(body_bytes(path))
    content_type = b"application/json" if draw(st.integers(0, 9)) else draw(st.sampled_from(_CONTENT_TYPES))
    extra = draw(st.lists(st.sampled_from(_HEADERS), max_size=2)) if draw(st.integers(0, 4)) == 0 else []
    upgrades = any(header.startswith(b"Upgrade") for header in extra)  # uvicorn then reads no body
    framing = draw(st.sampled_from(["length"] * 12 + ["chunked", "chunked garbage", "short", "long", "none", "both"]))
    start = [b"POST " + path.encode() + b" HTTP/1.1", b"Host: 127.0.0.1", b"Connection: close"]
    headers = [*start, b"Content-Type: " + content_type, *extra]
    length = {"short": max(0, len(body) - 3), "long": len(body) + 9}.get(framing, len(body))
    if framing in ("length", "short", "long", "both"):
        headers.append(b"Content-Length: %d" % length)
    sent = body
    if framing in ("chunked", "chunked garbage", "both"):
        headers.append(b"Transfer-Encoding: chunked")
        middle = len(body) // 2
        sent = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:middle], body[middle:]) if part)
        sent += b"0\r\n\r\n"
    if framing == "chunked garbage":
        sent = draw(st.sampled_from(_CHUNKED_GARBAGE))
    return RawRequest(
        b"\r\n".join(headers) + b"\r\n\r\n" + sent,
        must_answer=framing in ("length", "chunked", "none") and not upgrades,
    )


@st.composite
def odd_requests(draw: st.DrawFn) -> RawRequest:
    """Draw requests with unknown routes and methods."""
    method = draw(st.sampled_from(["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW", "POST", "get"]))
    paths = [*VALID, "/", "//", "/v1", "/v1/models", "/v1/responses/x", "/v1/responses/%00", "/v1/responses/x/cancel"]
    paths += ["/health", "/ping", "/load", "/version", "/docs", "/kv_event_sources", "/%ff"]
    paths += ["/v1/completions/", "/..%2f..%2fetc", "/v1/models/\xe9", "*", "http://a/v1/models", "/?" + "a=b&" * 500]
    path = draw(st.one_of(st.sampled_from(paths), st.text(st.characters(min_codepoint=33, max_codepoint=255))))
    body = draw(st.sampled_from([b"", b"{}", b"[]", b"null", b"\xff"]))
    lines = [f"{method} {path} HTTP/1.1".encode("latin-1"), b"Host: 127.0.0.1", b"Connection: close"]
    lines += [b"Content-Length: %d" % len(body), b"Content-Type: application/json"]
    return RawRequest(b"\r\n".join(lines) + b"\r\n\r\n" + body, must_answer=path.startswith("/"))


_GARBAGE = [
    *(b"GET", b"\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\0\x01", b"GET / HTTP/9.9\r\n\r\n"),
    *(b"POST /v1/completions HTTP/1.1\r\n" + b"a: b\r\n" * 2000, b"GET /" + b"a" * 100_000, b"\0" * 70_000),
]
_garbage = st.one_of(st.binary(max_size=200), st.sampled_from(_GARBAGE)).map(
    lambda data: RawRequest(data, must_answer=False)
)

raw_requests = st.integers(0, 19).flatmap(
    lambda kind: _garbage if kind == 0 else odd_requests() if kind <= 2 else posts()
)


def valid_request(path: str) -> RawRequest:
    """Return a request that must be served."""
    body = json.dumps(VALID[path]).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return RawRequest(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)


# --- the answers


@dataclass(frozen=True)
class Answer:
    """The status, content type and body of an answer."""

    status: int
    content_type: str
    body: bytes


def exchange(port: int, request: RawRequest) -> Answer | None:
    """Send a request and read the whole answer; None if the server closed the connection before it was complete.

    If the request need not be answered, the server may be unable to tell where it ends, so the sending side is closed.
    Raises TimeoutError after `DEADLINE_S` without a byte.
    """
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as connection:
        try:
            connection.sendall(request.data)
            if not request.must_answer:
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # refused before all was sent: the answer may be there
        try:
            response = http.client.HTTPResponse(connection, method=request.data.split(b" ", 1)[0].decode("latin-1"))
            response.begin()
            body = response.read(LARGEST_ANSWER_BYTES + 1)
            return Answer(response.status, response.getheader("content-type", ""), body)
        except (http.client.BadStatusLine, http.client.IncompleteRead, ConnectionResetError):
            return None


def check_answer(answer: Answer | None) -> None:
    """Check that a refusal is the client's fault and says in words what was wrong."""
    if answer is None:
        return
    assert answer.status < 500, f"{answer.status}: {answer.body[:500]!r}"
    assert len(answer.body) <= LARGEST_ANSWER_BYTES, f"an answer of more than {LARGEST_ANSWER_BYTES} bytes"
    if answer.content_type.startswith("text/event-stream"):
        for line in answer.body.split(b"\n"):
            if line.startswith(b"data: {"):
                _check_event(json.loads(line[6:]))
    elif answer.body and answer.status >= 400 and answer.content_type.startswith("application/json"):
        assert message_of(json.loads(answer.body)), f"{answer.status} without a message: {answer.body[:500]!r}"


def message_of(body: Any) -> str | None:
    """Return the message of an error, from vLLM or from Starlette, which may answer before vLLM is asked."""
    told = body if isinstance(body, dict) else {}
    error = told.get("error")
    message = error.get("message") if isinstance(error, dict) else told.get("detail")
    return message if isinstance(message, str) else None


def _check_event(event: dict[str, Any]) -> None:
    """Check an error inside a stream, which must say the status it would have had."""
    error = event.get("error")
    if isinstance(error, dict):
        assert error.get("message"), event
        code = error.get("code")
        assert not isinstance(code, int) or code < 500, event
