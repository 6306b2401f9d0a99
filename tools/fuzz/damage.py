"""Almost valid input: JSON and msgpack with a value replaced, removed or added, or with damaged bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st

_scalar: st.SearchStrategy[Any] = st.one_of(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=10),
    st.binary(max_size=10),
    st.sampled_from([31, 33, 2**31, 2**63, "x" * 200, b"\xff\xfe", b"\x91" * 2000, "open", "127.0.0.1:1", "prefill"]),
)
_value = st.one_of(
    _scalar,
    st.lists(_scalar, max_size=3),
    st.dictionaries(st.sampled_from(["", "a", "type", "handoff_id"]), _scalar, max_size=2),
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
    return draw(bent(data, _HOSTILE_BYTES)) if draw(st.integers(0, 3)) == 0 else data


@st.composite
def bent(draw: st.DrawFn, data: bytes, inserts: Sequence[bytes]) -> bytes:
    """Draw damaged bytes: some of them cut out, doubled, or replaced by a byte or one of these."""
    first, last = sorted(draw(st.tuples(*[st.integers(0, len(data))] * 2)))
    middle = draw(st.one_of(st.sampled_from([b"", data, *inserts]), st.binary(min_size=1, max_size=1)))
    return data[:first] + middle + data[last:]


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
