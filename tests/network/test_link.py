"""The gRPC transport over a real, slow, breakable wire: two network namespaces of this machine."""

import asyncio
import itertools
import random
import statistics
import time

import pytest

from ridgeline.contracts import errors
from ridgeline.kv_transfer.wire.grpc_methods import KEEPALIVE_S, KEEPALIVE_TIMEOUT_S
from tests.network.link import RATE_BYTES_S, CannotLink, Link
from tests.network.peer import LEASE_S, SHAPE

pytestmark = pytest.mark.network

NUM_BLOCKS = 54
NUM_BYTES = SHAPE.handoff_bytes(NUM_BLOCKS)
MOST_ROUNDS = 60
"""Other work on this machine's cores can only slow a hand-off down; one of them must fill the link."""
FULL = 0.85
SOURCE, TARGET = 0, 1
CONNECTED_WITHIN_S = 6.0
"""After the link is back: one attempt to connect that began before, and the longest pause after it (`grpc_methods`).
Until then fetches fail at once, which is right: decode computes the prompt meanwhile."""


@pytest.fixture
def link():
    try:
        with Link() as link:
            yield link
    except CannotLink as reason:
        pytest.skip(str(reason))


@pytest.fixture
def tell(request, capfd):
    """Show a measured figure, of a test that passes as well."""
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")

    def show(sentence):
        with capfd.disabled():
            reporter.write_line(f"\n  {sentence}")

    return show


async def hand_over(source, target, name, timeout_s=60.0):
    """One hand-off between random blocks; its result and seconds. What arrives must be what was sent."""
    ids, targets = (
        random.sample(range(SHAPE.num_blocks), NUM_BLOCKS),
        random.sample(range(SHAPE.num_blocks), NUM_BLOCKS),
    )
    handoff = await source.ask("publish", name, ids)
    answer = await target.ask("fetch", name, handoff, targets, timeout_s=timeout_s)
    if answer["result"]["outcome"] == "ok":
        assert answer["result"]["num_bytes"] == NUM_BYTES
        assert await target.ask("digest", targets) == await source.ask("digest", ids)
    return answer["result"], answer["took_s"]


async def first_that_works(source, target, deadline_s):
    """Hand-offs one after the other until one arrives: its name and seconds. Those before it fail as unreachable."""
    names = map("after-{}".format, itertools.count())
    name = next(names)
    result, took_s = await hand_over(source, target, name)
    while result["outcome"] != "ok":
        assert result["reason"] == errors.UNREACHABLE, result
        assert time.monotonic() < deadline_s, result
        await asyncio.sleep(0.2)
        name = next(names)
        result, took_s = await hand_over(source, target, name)
    return name, took_s


async def test_a_handoff_of_40_mb_fills_85_percent_of_a_gigabit_link(link, tell):
    async with link.peer(SOURCE) as source, link.peer(TARGET) as target:
        result, first_s = await hand_over(source, target, "first")
        assert result["outcome"] == "ok", result
        seconds = []
        while len(seconds) < MOST_ROUNDS and (not seconds or NUM_BYTES / min(seconds) < FULL * RATE_BYTES_S):
            result, took_s = await hand_over(source, target, f"request-{len(seconds)}")
            assert result["outcome"] == "ok", result
            seconds.append(took_s)
        best, median, worst = (
            NUM_BYTES / took_s / RATE_BYTES_S for took_s in (min(seconds), statistics.median(seconds), max(seconds))
        )
        tell(
            f"{NUM_BYTES / 1e6:.1f} MB in {statistics.median(seconds) * 1e3:.0f} ms, first {first_s * 1e3:.0f} ms; "
            f"of the link: best {best:.1%}, median {median:.1%}, worst {worst:.1%} of {len(seconds)}"
        )
        assert best >= FULL


@pytest.mark.parametrize("how", [Link.pull_out, Link.silence])
@pytest.mark.parametrize("kv_fetch_timeout_s", [4.0, pytest.param(30.0, marks=pytest.mark.long)])
async def test_a_cut_link_fails_the_fetch_in_time_and_once_mended_the_next_one_works(
    link, tell, how, kv_fetch_timeout_s
):
    async with link.peer(SOURCE) as source, link.peer(TARGET, kv_fetch_timeout_s) as target:
        assert (await hand_over(source, target, "before"))[0]["outcome"] == "ok"

        link.slow_down()
        before_bytes = link.received_bytes(TARGET)
        cut = asyncio.create_task(hand_over(source, target, "cut"))
        deadline_s = time.monotonic() + 10
        while link.received_bytes(TARGET) - before_bytes < NUM_BYTES // 8:
            assert time.monotonic() < deadline_s, "the transfer did not begin"
            await asyncio.sleep(0.005)
        how(link)
        result, took_s = await cut
        noticed_by_s = min(kv_fetch_timeout_s, KEEPALIVE_S + KEEPALIVE_TIMEOUT_S)
        tell(
            f"cut after {result['num_bytes'] / 1e6:.1f} of {NUM_BYTES / 1e6:.1f} MB: "
            f"{result['reason']} after {took_s:.1f} s"
        )
        assert result["outcome"] == "failed"
        assert result["reason"] in (errors.UNREACHABLE, errors.TIMEOUT)
        assert 0 < result["num_bytes"] < NUM_BYTES
        assert took_s < noticed_by_s + 5  # gRPC looks at its keepalive now and then

        link.mend()
        mended_s = time.monotonic()
        after, took_s = await first_that_works(source, target, mended_s + CONNECTED_WITHIN_S)
        tell(f"the next hand-off was there {time.monotonic() - mended_s:.1f} s after the link, in {took_s:.2f} s")
        for request_id in ("cut", after):
            freed = await source.ask("wait_freed", request_id, kv_fetch_timeout_s + LEASE_S + 10)
            assert freed, f"the blocks of {request_id} are still held"
            tell(f"the blocks of {request_id!r} were free {time.monotonic() - mended_s:.1f} s after the link")
