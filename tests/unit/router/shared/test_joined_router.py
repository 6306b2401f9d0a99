"""What waits for a router that does not read: the newest of what all are told, in batches that gRPC carries."""

import asyncio

import msgspec

from ridgeline.router.fleet.request_route import Demand
from ridgeline.router.flow.admission import Held
from ridgeline.router.placement.placement_events import Denied
from ridgeline.router.placement.places import Placement
from ridgeline.router.settings import RouterStart
from ridgeline.router.shared.dispatcher import MOST_AT_ONCE, JoinedRouter
from ridgeline.router.shared.holdings import Parts
from ridgeline.router.shared.link import give_up_without_a_dispatcher
from ridgeline.router.shared.messages import Downs, Holds, Joins, Others
from ridgeline.worker_runtime.client import decoder, encode
from tests.support.samples import router_settings


def joined(parts):
    return JoinedRouter(_State(), parts)


def news(number):
    return msgspec.Raw(encode(Denied(number, "lost", "x" * 10_000)))


async def test_a_router_that_did_not_read_for_a_while_is_told_the_newest_only():
    parts = Parts()
    slow, other = joined(parts), joined(parts)
    slow.look()
    await slow.next_batch()
    for number in range(200):  # 20 s
        slow.show("sums", news(number))
        other.take(Holds({f"client-{client}": Held(number + 1, 1) for client in range(500)}))
        slow.look()
    batch = encode(await slow.next_batch())
    read = decoder(Downs)(batch).messages
    assert [type(message) for message in read] == [Denied, Others]
    assert read[0].number == 199
    assert len(read[1].changed) == 500
    assert len(batch) < 30_000, "10 KB of news and 500 clients, not 200 times as much"


async def test_many_messages_go_in_several_batches_and_in_their_order():
    router = joined(Parts())
    for number in range(2 * MOST_AT_ONCE + 1):
        router.send(Denied(number, "lost", ""))
    read = [decoder(Downs)(encode(await router.next_batch())).messages for _ in range(3)]
    assert [len(messages) - (messages is read[0]) for messages in read] == [MOST_AT_ONCE, MOST_AT_ONCE, 1]
    told = [message.number for messages in read for message in messages if isinstance(message, Denied)]
    assert told == list(range(2 * MOST_AT_ONCE + 1))


async def test_a_router_that_has_gone_holds_nothing_for_the_others():
    parts = Parts()
    gone, stays = joined(parts), joined(parts)
    gone.take(Joins(RouterStart("gone")))
    gone.take(Holds({"a": Held(3, 30)}, 1.0, 2.0))
    stays.look()
    assert (await stays.next_batch()).messages == [
        Others(whole=True, changed={"a": Held(3, 30)}, sequences_per_s=1.0, blocks_per_s=2.0)
    ]
    gone.close()
    stays.look()
    assert (await stays.next_batch()).messages == [
        Others(whole=False, changed={"a": Held()}, sequences_per_s=0, blocks_per_s=0)
    ]


class Away:
    """A link without a dispatcher, which counts how often it is asked."""

    address, asked = "nowhere", 0

    def __init__(self, looks):
        self.looks, self.enough = looks, asyncio.Event()

    @property
    def away_s(self):
        self.asked += 1
        if self.asked >= self.looks:
            self.enough.set()
        return 0.0

    def send(self, _message):
        pass


async def test_however_many_prompts_wait_one_look_for_a_dispatcher_serves_them_all(monkeypatch):
    monkeypatch.setattr("ridgeline.router.shared.link.LOOK_EVERY_S", 0.0)
    link = Away(looks=5)
    placement = Placement(_Fleet(), router_settings(), link.send)
    waiting = [asyncio.create_task(_place(placement)) for _ in range(100)]
    await asyncio.sleep(0)
    looking = asyncio.create_task(give_up_without_a_dispatcher(link, placement, 10.0))
    await link.enough.wait()
    assert link.asked == 5
    for task in (looking, *waiting):
        task.cancel()
    await asyncio.wait((looking, *waiting))


class _Fleet:
    workers = ()


class _State:
    def left(self, _requests):
        pass


async def _place(placement):
    async with placement.place(Demand(10)):
        pass
