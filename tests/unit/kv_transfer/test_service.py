"""The service two engines own, over the real transport: everything the connector relies on."""

import asyncio
import os
import threading
import time

import pytest
import torch

from ridgeline.contracts import errors
from ridgeline.kv_transfer.memory.shared import KvCacheAllocation
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.kv_transfer.service import RankLayers, TransferService
from tests.support.clock import FakeClock
from tests.support.patience import PATIENCE_S, in_the_end
from tests.support.samples import handoff_at, kv_layout

NUM_BLOCKS = 16
LAYER_STRIDE = 1 << 20


def make_service(transport="grpc", lease_s=30.0, num_layers=2, **changes):
    allocation = KvCacheAllocation()
    with allocation.serving_torch_zeros():
        buffer = torch.zeros(num_layers * LAYER_STRIDE, dtype=torch.int8, device="cpu")
    layers = {
        f"layer{n}": buffer[n * LAYER_STRIDE :][: NUM_BLOCKS * 64].view(torch.uint8).view(NUM_BLOCKS, 2, 4, 8)
        for n in range(num_layers)
    }
    for layer in layers.values():
        layer.random_(0, 255)
    fields = {"kv_dtype": "auto", "block_size": 4, "num_layers": num_layers, "block_bytes": 64}
    layout = kv_layout(**fields | changes)
    options = TransferOptions(host="127.0.0.1", lease_s=lease_s, kv_fetch_timeout_s=PATIENCE_S, transport=transport)
    service = TransferService(RankLayers(layers, layout, allocation.offer(list(layers.values()))), options)
    service.waited_for = waited_for_in(service)
    service.start()
    return service, layers


def waited_for_in(service):
    """Ids that a peer has asked for before they were published; it then waits as long as it takes."""
    service._source.server._publish_wait_s = PATIENCE_S
    waited_for, wait = set(), service.leases.wait_published

    def noted(handoff_id, timeout_s):
        waited_for.add(handoff_id)
        return wait(handoff_id, timeout_s)

    service.leases.wait_published = noted
    return waited_for


@pytest.fixture
def started():
    """Makes services, and closes them in the end."""
    made = []

    def make(*args, **changes):
        made.append(make_service(*args, **changes))
        return made[-1]

    yield make
    for service, _ in reversed(made):
        service.close()


@pytest.fixture(params=["grpc", "shm"])
def pair(request, started):
    return *started(request.param), *started(request.param)


def offer(service, request_id, block_ids, lease_s=30.0):
    handoff = handoff_at(service.address, len(block_ids), lease_s=lease_s)
    service.publish(request_id, handoff.handoff_id, block_ids, handoff.num_tokens)
    return handoff


def collect(service, wanted, timeout_s=PATIENCE_S):
    """Poll as an idle engine does until `wanted(sent, results)`; each id may come only once."""
    sent, results = set(), {}
    deadline_s = time.monotonic() + timeout_s
    while not wanted(sent, results):
        assert time.monotonic() < deadline_s, (sent, results)
        service.wait(0.05)
        completed = service.poll()
        assert not completed.sent & sent
        assert not completed.received & results.keys()
        assert completed.received == completed.results.keys()
        assert completed.failed == {r for r, result in completed.results.items() if result.outcome != "ok"}
        sent |= completed.sent
        results |= completed.results
    return sent, results


def test_a_handoff_ends_with_equal_blocks_and_nothing_held(pair):
    prefill, source, decode, target = pair
    handoff = offer(prefill, "p", [3, 1, 2])
    decode.watch(handoff)
    decode.start_fetch("d", handoff, {1: [7, 8]})
    _, results = collect(decode, lambda _sent, results: results)
    assert results["d"].outcome == "ok"
    assert results["d"].num_bytes == 2 * 2 * 64
    for name in source:
        assert torch.equal(target[name][[7, 8]], source[name][[1, 2]])
    sent, _ = collect(prefill, lambda sent, _results: sent)
    assert sent == {"p"}
    assert (prefill.stats().open_leases, prefill.stats().pinned_blocks) == (0, 0)
    stats = decode.stats()
    assert (stats.active_fetches, stats.watched_handoffs) == (0, 0)
    assert stats.fetches_total == {"ok": 1}
    assert stats.bytes_received_total == prefill.stats().bytes_sent_total == 256


def test_a_fetch_may_come_before_the_publication(pair):
    prefill, _, decode, _ = pair
    handoff = handoff_at(prefill.address, 1)
    decode.start_fetch("d", handoff, {0: [1]})
    in_the_end(lambda: prefill.waited_for)
    prefill.publish("p", handoff.handoff_id, [1], 4)
    _, results = collect(decode, lambda _sent, results: results)
    assert results["d"].outcome == "ok"


def test_cancel_ends_in_one_completion_and_frees_the_source(pair):
    prefill, _, decode, _ = pair
    handoffs = [offer(prefill, f"p{n}", [n]) for n in range(8)]
    for n, handoff in enumerate(handoffs):
        decode.start_fetch(f"d{n}", handoff, {0: [n]})
        decode.cancel(f"d{n}")
        decode.cancel(f"d{n}")
    decode.cancel("never started")
    _, results = collect(decode, lambda _sent, results: len(results) == 8)
    assert {result.outcome for result in results.values()} <= {"cancelled", "ok"}
    sent, _ = collect(prefill, lambda sent, _results: len(sent) == 8)
    assert sent == {f"p{n}" for n in range(8)}


def test_release_without_a_fetch_frees_the_source_once(pair):
    prefill, _, decode, _ = pair
    handoff = offer(prefill, "p", [1])
    decode.watch(handoff)
    decode.release(handoff)
    decode.release(handoff)
    assert collect(prefill, lambda sent, _results: sent)[0] == {"p"}
    assert decode.stats().watched_handoffs == 0


def test_a_release_counts_at_once_because_no_step_may_follow_it(pair):
    prefill, _, decode, _ = pair
    handoff, gate = offer(prefill, "p", [1]), threading.Event()
    decode.watch(handoff)
    in_the_end(lambda: decode.stats().watched_handoffs == 1)
    decode._post(gate.wait)
    decode.release(handoff)
    assert decode.stats().watched_handoffs == 0
    gate.set()
    assert collect(prefill, lambda sent, _results: sent)[0] == {"p"}


def test_a_second_fetch_for_one_request_is_refused(pair):
    prefill, _, decode, _ = pair
    handoff = offer(prefill, "p", [1])
    decode.start_fetch("d", handoff, {0: [1]})
    with pytest.raises(ValueError, match="already has a fetch"):
        decode.start_fetch("d", handoff, {0: [1]})


class TimedLeases:
    """A service whose leases live by a clock that stands still until told, and when each was renewed by it.

    What is offered says that its lease is short: by that the other side paces its renewals.
    """

    def __init__(self, service):
        self.clock, self.renewed_s = FakeClock(), {}
        service.leases._clock, renew = self.clock, service.leases.renew

        def noted(handoff_id):
            renewed_s = self.clock()
            renewed = renew(handoff_id)
            self.renewed_s[handoff_id] = renewed_s
            return renewed

        service.leases.renew = noted

    def pass_with_a_renewal(self, seconds, handoff):
        self.clock.now_s += seconds
        in_the_end(lambda: self.renewed_s.get(handoff.handoff_id) == self.clock())


BEATS_SOON_S = 0.06


def test_heartbeats_keep_the_lease_until_they_stop(started):
    (prefill, _), (decode, _) = started(lease_s=1.0), started()
    timed = TimedLeases(prefill)
    handoff = offer(prefill, "p", [1], BEATS_SOON_S)
    decode.watch(handoff)
    for _ in range(3):
        timed.pass_with_a_renewal(0.9, handoff)
        assert prefill.poll().sent == set()
    decode.close()
    timed.clock.now_s += 1.0
    assert collect(prefill, lambda sent, _results: sent)[0] == {"p"}
    assert prefill.stats().expired_leases_total == 1


def test_a_handoff_that_is_watched_no_more_lives_out_its_lease_unless_it_is_fetched(started):
    (prefill, _), (decode, _) = started(lease_s=1.0), started()
    timed = TimedLeases(prefill)
    left, fetched = (offer(prefill, name, [n], BEATS_SOON_S) for n, name in enumerate(("left", "fetched"), 1))
    for handoff in (left, fetched):
        decode.watch(handoff)
        decode.unwatch(handoff)
    decode.watch(fetched)
    timed.pass_with_a_renewal(0.9, fetched)
    assert prefill.poll().sent == set()
    timed.pass_with_a_renewal(0.9, fetched)
    assert collect(prefill, lambda sent, _results: sent)[0] == {"left"}
    assert prefill.stats().expired_leases_total == 1
    decode.start_fetch("d", fetched, {0: [3]})
    _, results = collect(decode, lambda _sent, results: results)
    assert results["d"].outcome == "ok"


def test_a_vanished_source_fails_the_fetch_and_stops_the_heartbeats(monkeypatch, started):
    monkeypatch.setattr("ridgeline.kv_transfer.service.LAST_RELEASES_S", 0.0)
    (prefill, _), (decode, _) = started(), started()
    handoff = offer(prefill, "p", [1])
    prefill.close()
    decode.watch(handoff)
    decode.start_fetch("d", handoff, {0: [1]})
    _, results = collect(decode, lambda _sent, results: results)
    assert (results["d"].outcome, results["d"].reason) == ("failed", errors.UNREACHABLE)
    assert decode.stats().watched_handoffs == 0
    assert decode.stats().fetches_total == {errors.UNREACHABLE: 1}


def test_a_layout_mismatch_is_counted_and_frees_the_source(started):
    (prefill, _), (decode, _) = started(), started(isa="vec")
    decode.start_fetch("d", offer(prefill, "p", [1]), {0: [1]})
    _, results = collect(decode, lambda _sent, results: results)
    assert "isa is 'vec' here and 'amx' there" in results["d"].message
    assert collect(prefill, lambda sent, _results: sent)[0] == {"p"}


def test_an_error_nobody_foresaw_still_completes_the_fetch(pair, caplog):
    prefill, _, decode, _ = pair

    async def broken(*_args):
        await asyncio.sleep(0)
        raise ZeroDivisionError("a bug")

    decode._fetcher.fetch = broken
    decode.start_fetch("d", offer(prefill, "p", [1]), {0: [1]})
    _, results = collect(decode, lambda _sent, results: results)
    assert (results["d"].outcome, results["d"].reason) == ("failed", errors.INTERNAL)
    assert "unforeseen" in caplog.text


def test_close_completes_what_is_under_way_and_ends_the_threads():
    before = set(threading.enumerate())
    (prefill, _), (decode, _) = make_service(), make_service()
    decode.start_fetch("d", handoff_at(prefill.address, 1), {0: [1]})  # never published: it waits
    in_the_end(lambda: prefill.waited_for)
    decode.close()
    decode.close()
    assert decode.poll().results["d"].outcome == "cancelled"
    decode.start_fetch("late", handoff_at(prefill.address, 1), {0: [1]})
    assert decode.poll().results["late"].outcome == "cancelled"
    prefill.close()
    in_the_end(lambda: not any("kv-" in thread.name for thread in set(threading.enumerate()) - before))


def test_wait_returns_at_once_on_news_and_after_the_timeout_without(pair):
    prefill, _, decode, _ = pair
    decode.poll()
    started_s = time.monotonic()
    decode.wait(0.05)
    assert time.monotonic() - started_s >= 0.04
    decode.start_fetch("d", offer(prefill, "p", [1]), {0: [1]})
    started_s = time.monotonic()
    decode.wait(PATIENCE_S)
    assert time.monotonic() - started_s < PATIENCE_S
    assert decode.poll().received == {"d"}


def test_a_taken_port_and_a_wrong_layout_are_refused_at_start(started):
    service, layers = started()
    layout = service._fetcher._layout
    other = TransferService(
        RankLayers(layers, layout), TransferOptions("127.0.0.1", int(service.address.rpartition(":")[2]))
    )
    with pytest.raises(OSError, match="is the port taken"):
        other.start()
    other.close()
    with pytest.raises(ValueError, match="the KV cache has"):
        started(block_bytes=65)
    with pytest.raises(ValueError, match="unknown KV transport"):
        started(transport="pigeon")


def test_a_source_that_is_gone_is_forgotten(pair):
    prefill, _, decode, _ = pair
    assert not isinstance(decode.pair([prefill.address]).result(PATIENCE_S)[prefill.address], str)
    assert decode.pair([]).result(PATIENCE_S) == {}
    assert decode._fetcher._pairings == {}


def test_a_cache_for_which_this_process_has_no_address_space_is_fetched_over_grpc():
    (prefill, source), (decode, target) = make_service("auto"), make_service("auto")
    descriptor = os.memfd_create("larger than any address space")
    os.ftruncate(descriptor, 1 << 60)
    prefill._source.server._offers["shm"] |= {
        "descriptor": descriptor,
        "inode": os.fstat(descriptor).st_ino,
        "num_bytes": 1 << 60,
    }
    try:
        paired = decode.pair([prefill.address]).result(PATIENCE_S)[prefill.address]
        assert not isinstance(paired, str)
        assert paired.transport == "grpc"
        assert "cannot be mapped (Cannot allocate memory)" in paired.why
        decode.start_fetch("d", offer(prefill, "p", [3]), {0: [7]})
        _, results = collect(decode, lambda _sent, results: results)
        assert results["d"].outcome == "ok"
        assert all(torch.equal(target[name][7], layer[3]) for name, layer in source.items())
    finally:
        for service in (decode, prefill):
            service.close()
        os.close(descriptor)


@pytest.mark.parametrize("published", [True, False], ids=["published", "not yet published"])
def test_a_hand_off_that_its_own_worker_gives_up_is_freed_at_once(published, started):
    service, _ = started()
    if published:
        service.publish("r", "h", [1, 2], 8)
    service.leases.release("h")
    if not published:
        service.publish("r", "h", [1, 2], 8)
    assert service.poll().sent == {"r"}
    assert service.stats().open_leases == 0
    assert service.leases.stale_handoffs() == []
