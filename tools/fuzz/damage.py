"""Almost valid input: JSON and msgpack with a value replaced, removed or added, or with damaged bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st

_INTEGERS = [0, 1, -1, 2, 31, 33, 255, 2**31 - 1, 2**31, -(2**31), 2**32, 2**63 - 1, -(2**63), 2**63, 2**64 - 1]
_SCALARS: list[Any] = [
    *(None, True, False, *_INTEGERS, 0.0, -1.5, 1e308, float("nan"), float("inf"), "", "a", "\0", "open", "é" * 70),
    *("x" * 200, b"", b"\xff\xfe", b"\x91" * 2000, [], {}, [[]], {"": None}, "127.0.0.1:1", "decode", "prefill"),
]
_value = st.one_of(
    st.sampled_from(_SCALARS),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=10),
    st.binary(max_size=10),
    st.lists(st.sampled_from(_SCALARS), max_size=3),
    st.dictionaries(st.sampled_from(["", "a", "type", "handoff_id"]), st.sampled_from(_SCALARS), max_size=2),
)
_HOSTILE_BYTES = [
    *(b"\xc1", b"\xff", b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff", b"\x91" * 3000),
    *(b"\x81\xa1a" * 2000, b"\xa2\xff\xfe", b"\xdb\xff\xff\xff\xff", b"\xd6\xff\0\0\0\0"),
    b"\xc7\x0c\xff" + b"\xff" * 12,
]


@st.composite
def trees(draw: st.DrawFn, valid: Any, values: st.SearchStrategy[Any] = _value) -> Any:
    """Draw the same tree of builtins with up to three places changed to one of these values."""
    for _ in range(draw(st.integers(0, 3))):
        valid = _changed(draw, valid, values)
    return valid


@st.composite
def messages(draw: st.DrawFn, valid: Sequence[Any]) -> bytes:
    """Draw one of these trees as msgpack, changed as a tree, as bytes, both or not at all; rarely random bytes."""
    if draw(st.integers(0, 11)) == 0:
        return draw(st.binary(max_size=64))
    data = msgspec.msgpack.encode(draw(trees(draw(st.sampled_from(valid)))))
    if draw(st.integers(0, 3)) == 0:
        data = draw(bent(data, _HOSTILE_BYTES))
    return data


@st.composite
def bent(draw: st.DrawFn, data: bytes, inserts: Sequence[bytes]) -> bytes:
    """Draw damaged bytes: cut, doubled, with a changed byte, or with one of these inserted."""
    at = draw(st.integers(0, len(data)))
    kind = draw(st.sampled_from(["cut", "double", "byte", "insert", "tail"]))
    if kind == "cut":
        return data[:at]
    if kind == "double":
        return data + data
    if kind == "byte":
        return data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :]
    hostile = draw(st.sampled_from(inserts))
    return data[:at] + hostile + (data[at + 1 :] if kind == "insert" else b"")


def _changed(draw: st.DrawFn, tree: Any, values: st.SearchStrategy[Any]) -> Any:
    """Walk down to a random place and change it."""
    if isinstance(tree, dict) and tree and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(tree, key=str)))
        kind = draw(st.integers(0, 7))
        if kind == 0:
            return {name: value for name, value in tree.items() if name != key}
        if kind == 1:
            return tree | {draw(st.text(max_size=4)): draw(values)}
        return tree | {key: _changed(draw, tree[key], values)}
    if isinstance(tree, list) and tree and draw(st.integers(0, 2)):
        at = draw(st.integers(0, len(tree) - 1))
        return [*tree[:at], _changed(draw, tree[at], values), *tree[at + 1 :]]
    if isinstance(tree, list) and draw(st.integers(0, 9)) == 0:
        return tree * draw(st.sampled_from([2, 500]))
    return draw(values)
