"""Messages of a hostile source of the collective transport: unexpected chunks, or none.

`check_chunk` decides how much memory a tensor gets and where it is written, so what it accepts is checked here.
"""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st

from ridgeline.contracts import errors
from ridgeline.kv_transfer.collective.puller import _decode_told, check_chunk
from ridgeline.kv_transfer.collective.wire import Chunk, End
from ridgeline.kv_transfer.wire import grpc_methods
from tools.fuzz.damage import messages

BLOCKS = 4


def _valid() -> list[bytes]:
    """Return the messages for two segments of two blocks, the first one in two tensors."""
    chunks = [
        Chunk(first=first, count=count, ends_segment=ends)
        for first, count, ends in ((0, 1, False), (1, 1, True), (2, 2, True))
    ]
    end = End(first_token=5, checksums=[7, 8, -9])
    return [msgspec.msgpack.encode(told) for told in (*chunks, end)]


_VALID = _valid()
_told = st.one_of(
    st.sampled_from(_VALID), messages([msgspec.msgpack.decode(message) for message in _VALID]), st.binary(max_size=20)
)


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """Draw the valid messages with some replaced, removed or repeated."""
    said = list(_VALID)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(said)))
        said[at : at + draw(st.integers(0, 2))] = draw(st.lists(_told, max_size=2))
    return said


def check_conversation(said: list[bytes]) -> None:
    """Check that each accepted chunk lies inside what was asked for, and only once; a whole answer has all of them."""
    landed, reason = set[int](), errors.CORRUPTED
    try:
        for message in said:
            told = grpc_methods.read_answer(_decode_told, message, "fuzz")
            if isinstance(told, End):
                return
            check_chunk(told, due=len(landed), num_blocks=BLOCKS, most_blocks=BLOCKS)
            blocks = set(range(told.first, told.first + told.count))
            assert blocks <= set(range(BLOCKS)), told
            assert not blocks & landed, told
            landed |= blocks
    except errors.TransferFailed as error:
        reason = error.reason
    assert reason == errors.CORRUPTED, f"refused as {reason}"
