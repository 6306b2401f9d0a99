"""The lease table: examples for each rule, then a random walk against a model."""

import threading
from contextlib import ExitStack

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from ridgeline.contracts import errors
from ridgeline.prefill_worker.kv_source.lease import REMEMBERED_ENDINGS, LeaseTable
from tests.support.clock import FakeClock
from tests.support.patience import PATIENCE_S


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def leases(clock):
    return LeaseTable(clock=clock)


def publish(leases, handoff_id="h", owner="r", lease_s=10.0):
    leases.publish(handoff_id, owner, [1, 2], 5, lease_s)


def test_a_released_owner_is_reported_exactly_once(leases):
    publish(leases)
    assert leases.take_finished() == set()
    assert leases.release("h") is True
    assert leases.release("h") is False
    assert leases.take_finished() == {"r"}
    assert leases.take_finished() == set()


def test_a_lease_expires_at_its_time_and_not_before(leases, clock):
    publish(leases)
    clock.now_s += 9.99
    assert leases.expire() == 0
    clock.now_s += 0.01
    assert leases.expire() == 1
    assert leases.take_finished() == {"r"}
    assert leases.stats().expired_leases_total == 1
    with pytest.raises(errors.LeaseExpired), leases.reading("h"):
        pass


def test_renewing_after_the_time_is_up_is_refused_even_if_nobody_looked(leases, clock):
    publish(leases)
    clock.now_s += 10
    assert leases.renew("h") is False
    assert leases.take_finished() == {"r"}


def test_a_read_holds_off_expiry_and_release(leases, clock):
    publish(leases)
    with leases.reading("h") as read:
        assert read.blocks.block_ids == (1, 2)
        clock.now_s += 100
        assert leases.expire() == 0
        leases.release("h")
        with pytest.raises(errors.UnknownHandoff), leases.reading("h"):
            pass
        assert leases.renew("h") is False
        assert leases.take_finished() == set()
    assert leases.take_finished() == {"r"}
    assert leases.stats().expired_leases_total == 0


def test_a_release_is_remembered_after_a_revocation_too(leases):
    leases.extend("h", "r", [1])
    leases.revoke("h")  # the prompt was preempted, and is computed again
    assert leases.release("h") is True
    publish(leases)
    assert leases.take_finished() == {"r"}
    assert leases.stats().open_leases == 0


def test_a_release_during_a_read_is_remembered_after_a_revocation_too(leases):
    leases.extend("h", "r", [1])
    with leases.reading("h"):
        assert leases.release("h") is True  # the reader has given up, and its call has not ended here yet
        leases.revoke("h")
        publish(leases)
        assert leases.take_finished() == {"r"}
    assert leases.stats().open_leases == 0


def test_a_hand_off_that_nobody_releases_tells_its_life(leases, clock, caplog):
    leases.extend("h", "r", [1])
    publish(leases)
    assert leases.stale_handoffs() == []
    clock.now_s += 3.0
    with leases.reading("h"):
        pass
    [life] = leases.stale_handoffs()
    assert "partial at 0.000 s, published with 2 blocks for r at 0.000 s, read at 3.000 s, read ended at 3" in life
    assert "h:" not in life, "its id entitles to read the blocks"
    clock.now_s += 11.0
    assert leases.expire() == 1
    assert "now 14.000 s" in caplog.text
    assert leases.stale_handoffs() == []


def test_the_release_says_who_it_was(leases, clock):
    leases.release("h", 0, 2, by="ipv4:10.0.0.1:7")
    leases.publish("h2", "r2", [1], 3, 10.0)
    leases.release("h2", 0, 2, by="ipv4:10.0.0.1:7")
    clock.now_s += 3.0
    assert "released by ipv4:10.0.0.1:7 at 0.000 s, now 3.000 s" in leases.stale_handoffs()[0]


def test_an_owner_may_come_back_after_it_finished(leases):
    publish(leases)
    leases.release("h")
    leases.take_finished()
    publish(leases, "h2")
    leases.release("h2")
    assert leases.take_finished() == {"r"}


def test_misuse_is_refused(leases):
    publish(leases)
    with pytest.raises(ValueError, match="already published"):
        publish(leases, owner="other")
    with pytest.raises(ValueError, match="has an open hand-off"):
        publish(leases, "h2")
    with pytest.raises(ValueError, match="positive"):
        publish(leases, "h3", "r3", lease_s=0)


def test_endings_are_forgotten_in_the_end(leases):
    for index in range(REMEMBERED_ENDINGS + 10):
        leases.release(f"unknown{index}")
    assert len(leases._endings) == REMEMBERED_ENDINGS


def test_finishing_tells_the_listener(clock):
    told = []
    leases = LeaseTable(clock=clock, on_finished=lambda: told.append(True))
    publish(leases)
    assert not told
    leases.release("h")
    assert told


def test_waiting_ends_with_the_publication(leases):
    assert leases.wait_published("h", 0.01) is False
    threading.Timer(0.02, publish, [leases]).start()
    assert leases.wait_published("h", PATIENCE_S) is True
    leases.release("h")
    assert leases.wait_published("h", 0.0) is True


def test_a_partial_handoff_gives_its_blocks_as_they_become_final(leases):
    leases.extend("h", "r", [4, 5])
    with leases.reading("h") as read:
        assert leases.wait_blocks(read, 0, 0.0).block_ids == (4, 5)
        assert leases.wait_blocks(read, 2, 0.01).complete is False
        leases.extend("h", "r", [4, 5, 6])
        assert leases.wait_blocks(read, 2, 0.0).block_ids == (4, 5, 6)
        threading.Timer(0.02, lambda: leases.publish("h", "r", [4, 5, 6, 9], 100, 10.0, first_token=42)).start()
        whole = leases.wait_blocks(read, 3, PATIENCE_S)
        assert (whole.block_ids, whole.complete, whole.first_token) == ((4, 5, 6, 9), True, 42)
        leases.release("h")
        assert leases.take_finished() == set()
    assert leases.take_finished() == {"r"}


@pytest.mark.parametrize("ends", ["revoke", "release"])
def test_a_handoff_that_ends_before_any_block_is_final_leaves_nothing(leases, ends):
    leases.extend("h", "r", [])
    getattr(leases, ends)("h")
    assert (leases.stats().open_leases, leases.take_finished()) == (0, set())


def test_a_reader_that_waits_is_woken_when_the_last_step_begins(leases):
    leases.extend("h", "r", [])
    with leases.reading("h") as read:
        threading.Timer(0.02, leases.begin_last_step, [{"h": [4, 5]}]).start()
        assert leases.wait_blocks(read, 0, PATIENCE_S, in_last_step=2).complete is False
        assert read.all_block_ids == (4, 5)
        assert leases.wait_blocks(read, 0, 0.01, in_last_step=3).block_ids == (), "it asks for more than there are"


def test_in_its_last_step_a_partial_handoff_becomes_final_layer_by_layer(leases):
    leases.extend("h", "r", [4, 5])
    with leases.reading("h") as read:
        assert read.all_block_ids == ()
        leases.end_layer(3)
        assert not leases.wait_layer(read, 0, 0.0), "that was another step"
        leases.begin_last_step({"h": [4, 5, 6], "nobody-reads": [9]})
        assert (read.all_block_ids, read.blocks.block_ids) == ((4, 5, 6), (4, 5))
        assert not leases.wait_layer(read, 0, 0.0)
        threading.Timer(0.02, leases.end_layer, [1]).start()
        assert leases.wait_layer(read, 0, PATIENCE_S)
        assert not leases.wait_layer(read, 1, 0.0)
        leases.begin_last_step({})
        leases.end_layer(9)
        assert not leases.wait_layer(read, 1, 0.0), "that was the next step"
        leases.publish("h", "r", [4, 5, 6], 12, 10.0)
        assert leases.wait_layer(read, 1, 0.0)


def test_a_handoff_revoked_in_its_last_step_fails_readers(leases):
    leases.extend("h", "r", [4])
    with leases.reading("h") as read:
        leases.begin_last_step({"h": [4, 5]})
        leases.revoke("h")
        with pytest.raises(errors.TransferFailed, match="given up"):
            leases.wait_layer(read, 0, 0.0)


def test_a_partial_handoff_has_no_time_limit_until_it_is_complete(leases, clock):
    leases.extend("h", "r", [4])
    clock.now_s += 1000
    assert leases.expire() == 0
    assert leases.renew("h")
    leases.publish("h", "r", [4, 5], 8, 10.0)
    clock.now_s += 10
    assert leases.expire() == 1
    assert leases.take_finished() == {"r"}


def test_revoking_fails_readers_and_frees_nobody(leases):
    leases.extend("h", "r", [4])
    with leases.reading("h") as read:
        leases.revoke("h")
        with pytest.raises(errors.TransferFailed, match="given up"):
            leases.wait_blocks(read, 0, 0.0)
    with pytest.raises(errors.TransferFailed, match="revoked"), leases.reading("h"):
        pass
    assert leases.take_finished() == set(), "its request still runs: vLLM was never asked to keep the blocks"
    assert leases.stats().open_leases == 0


def test_a_revoked_handoff_may_be_published_when_it_was_computed_again(leases):
    leases.extend("h", "r", [4])
    leases.revoke("h")
    leases.extend("h", "r", [7])
    assert leases.stats().open_leases == 0, "nobody follows it any more"
    leases.publish("h", "r", [7, 8], 8, 10.0)
    with leases.reading("h") as read:
        assert leases.wait_blocks(read, 0, 0.0).block_ids == (7, 8)


def test_a_complete_handoff_cannot_be_revoked(leases):
    publish(leases)
    leases.revoke("h")
    with leases.reading("h") as read:
        assert leases.wait_blocks(read, 0, 0.0).block_ids == (1, 2)


def test_a_partial_handoff_released_early_is_freed_at_its_publication(leases):
    leases.extend("h", "r", [4])
    leases.release("h")
    assert leases.take_finished() == set()
    leases.extend("h", "r", [4, 5])
    assert leases.stats().open_leases == 0
    leases.publish("h", "r", [4, 5], 8, 10.0)
    assert leases.take_finished() == {"r"}


def test_final_blocks_may_not_change(leases):
    leases.extend("h", "r", [4, 5])
    with pytest.raises(ValueError, match="final"):
        leases.extend("h", "r", [4, 6, 7])
    with pytest.raises(ValueError, match="final"):
        leases.publish("h", "r", [4], 4, 10.0)
    with pytest.raises(ValueError, match="final"):
        leases.begin_last_step({"h": [4, 6]})


def test_every_reader_has_to_release(leases):
    publish(leases)
    assert leases.release("h", reader=1, readers=2) is False
    assert leases.release("h", reader=1, readers=2) is False
    assert leases.take_finished() == set()
    assert leases.release("h", reader=0, readers=2) is True
    assert leases.take_finished() == {"r"}


class LeaseWalk(RuleBasedStateMachine):
    """Any order of calls: each owner is freed exactly once, never under a read, never early, never forgotten."""

    handoffs = Bundle("handoffs")

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.leases = LeaseTable(clock=self.clock)
        self.deadline_s: dict[str, float] = {}
        self.lease_s: dict[str, float] = {}
        self.reads: dict[str, int] = {}
        self.contexts: dict[str, list[ExitStack]] = {}
        self.released: set[str] = set()
        self.freed: set[str] = set()
        self.serial = 0

    def open_ids(self) -> set[str]:
        return set(self.deadline_s) - self.freed

    def collect(self) -> None:
        for owner in self.leases.take_finished():
            handoff_id = owner.removeprefix("owner-")
            assert handoff_id not in self.freed, "freed twice"
            assert self.reads[handoff_id] == 0, "freed under a read"
            assert handoff_id in self.released or self.deadline_s[handoff_id] <= self.clock.now_s, "freed early"
            self.freed.add(handoff_id)

    @rule(target=handoffs, lease_s=st.integers(1, 20), announced=st.booleans())
    def publish(self, lease_s, announced):
        self.serial += 1
        handoff_id = str(self.serial)
        if announced:
            self.leases.release(handoff_id)
            self.released.add(handoff_id)
        self.leases.publish(handoff_id, f"owner-{handoff_id}", [1], 1, lease_s)
        self.deadline_s[handoff_id] = self.clock.now_s + lease_s
        self.lease_s[handoff_id] = lease_s
        self.reads[handoff_id] = 0
        return handoff_id

    @rule(handoff_id=handoffs)
    def renew(self, handoff_id):
        if self.leases.renew(handoff_id):
            assert handoff_id not in self.released | self.freed
            self.deadline_s[handoff_id] = max(self.deadline_s[handoff_id], self.clock.now_s + self.lease_s[handoff_id])

    @rule(handoff_id=handoffs)
    def release(self, handoff_id):
        self.leases.release(handoff_id)
        self.released.add(handoff_id)

    @rule(handoff_id=handoffs)
    def begin_read(self, handoff_id):
        read = ExitStack()
        try:
            read.enter_context(self.leases.reading(handoff_id))
        except errors.HandoffError:
            assert handoff_id in self.released or self.deadline_s[handoff_id] <= self.clock.now_s
        else:
            assert handoff_id not in self.released | self.freed
            self.reads[handoff_id] += 1
            self.deadline_s[handoff_id] = max(self.deadline_s[handoff_id], self.clock.now_s + self.lease_s[handoff_id])
            self.contexts.setdefault(handoff_id, []).append(read)

    @precondition(lambda self: any(self.reads.values()))
    @rule(data=st.data())
    def end_read(self, data):
        handoff_id = data.draw(st.sampled_from(sorted(h for h, count in self.reads.items() if count)))
        self.reads[handoff_id] -= 1
        self.contexts[handoff_id].pop().close()

    @rule(seconds=st.integers(1, 15))
    def time_passes(self, seconds):
        self.clock.now_s += seconds

    @rule()
    def expire(self):
        self.leases.expire()
        self.collect()
        overdue = [h for h in self.open_ids() if self.reads[h] == 0 and self.deadline_s[h] <= self.clock.now_s]
        assert not overdue

    @invariant()
    def the_table_agrees_with_the_model(self):
        self.collect()
        assert self.leases.stats().open_leases == len(self.open_ids())
        assert not {h for h in self.open_ids() if h in self.released and self.reads[h] == 0}

    def teardown(self):
        for reads in self.contexts.values():
            for read in reads:
                read.close()
        self.clock.now_s += 1000
        self.reads = dict.fromkeys(self.reads, 0)
        self.leases.expire()
        self.collect()
        assert self.freed == set(self.deadline_s)


TestLeaseWalk = LeaseWalk.TestCase
TestLeaseWalk.settings = settings(max_examples=30, stateful_step_count=20)
