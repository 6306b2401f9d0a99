"""What is brought back, when, how often, and who is told: the supervisor with actors and a clock that are none."""

import asyncio
from collections import deque
from functools import partial

import pytest

from ridgeline.cluster.config.models import SupervisionConfig
from ridgeline.cluster.runtime.handles.actor import (
    ActorGone,
    CoresBusy,
    DeploymentFailed,
    NoPlace,
    NotReached,
    WorkerRefused,
)
from ridgeline.cluster.runtime.supervision.registration import MAX_REGISTRATIONS, Registration
from ridgeline.cluster.runtime.supervision.restart_budget import RestartBudget
from ridgeline.cluster.runtime.supervisor import POLL_S, Supervisor
from tests.support.clock import FakeClock
from tests.support.symptoms import is_quoted


class Clock(FakeClock):
    def __init__(self):
        super().__init__(0.0)
        self.slept: list[float] = []

    async def sleep(self, seconds):
        self.slept.append(seconds)
        self.now_s += seconds
        await asyncio.sleep(0)


class Finished(Exception):
    """Ends a supervisor that would run for ever."""


class Actor:
    """Answers `failure` from a list, then is fine for ever."""

    def __init__(self, name, log, clock, health=(), pool=""):
        self.name, self.log, self.clock, self.pool = name, log, clock, pool
        self.health = deque(health)
        self.idle_polls = 0

    async def failure(self, known=None):
        await asyncio.sleep(0)
        if self.health:
            return self.health.popleft()
        self.idle_polls += 1
        if self.idle_polls > 50:
            raise Finished
        return ""

    async def end(self):
        self.log.append(f"end {self.name}")


class Worker(Actor):
    starts = 0
    start_s = 14.0
    places: tuple = ()
    never = False
    refuses: BaseException | None = None

    async def start_again(self):
        if self.places:
            raise self.places.pop()
        self.log.append(f"start {self.name}")
        self.clock.now_s += self.start_s
        if self.never:
            raise DeploymentFailed("no memory")
        if self.refuses is not None:
            error, self.refuses = self.refuses, None
            raise error
        self.starts += 1
        return f"{self.name}:{self.starts}"

    async def ending(self):
        return "its engine process was ended by SIGILL"

    async def retire(self):
        self.log.append(f"retire {self.name}")


class Router(Actor):
    kind = "router"
    gone_for = 0
    not_reached = 0
    refuses: BaseException | None = None
    partitioned: tuple = ()
    """Addresses that it has not reached for longer than `unreachable_timeout_s`."""
    missed: tuple = ()
    """Addresses that it does not reach at the moment."""

    def __init__(self, *args):
        super().__init__(*args)
        self.noted = []

    async def unreached(self, for_s):
        assert for_s in (0, 30)
        return [*self.partitioned, *(self.missed if for_s == 0 else ())]

    async def start_again(self, addresses):
        if not addresses:
            raise DeploymentFailed("router could not serve: IndexError: list index out of range")
        self.log.append(f"start router with {addresses}")

    async def note_away(self, away):
        self.noted.append(away)

    async def replace_worker(self, address, reason):
        if self.gone_for:
            self.gone_for -= 1
            raise ActorGone("router ended")
        if self.not_reached:
            self.not_reached -= 1
            raise NotReached("router could not replace_worker: WorkerLost: no connection within 30 s")
        if self.refuses is not None:
            error, self.refuses = self.refuses, None
            raise error
        self.log.append(f"replace {address} {reason}")

    async def remove_worker(self, worker_id):
        self.log.append(f"remove {worker_id}")


class refusing:
    """A start that fails so often, and is another one `then`."""

    def __init__(self, times, error=None):
        self.times, self.error = times, error or DeploymentFailed("no memory")

    async def __call__(self):
        self.times -= 1
        if self.times < 0:
            return await self.then()
        await asyncio.sleep(0)
        raise self.error


class Scene:
    """A deployment of two prefill and two decode workers; `health` by name."""

    def __init__(self, pools=("prefill", "prefill", "decode", "decode"), **health):
        self.clock, self.log, self.said = Clock(), [], []
        names = [f"worker-{number}" for number in range(len(pools))]
        told = {name.replace("_", "-"): answers for name, answers in health.items()}
        self.workers = [
            Worker(name, self.log, self.clock, told.get(name, ()), pool)
            for name, pool in zip(names, pools, strict=True)
        ]
        self.router = Router("router", self.log, self.clock, told.get("router", ()))
        self.supervise([self.router])

    def supervise(self, routers):
        self.routers = routers
        self.supervisor = Supervisor(
            self.workers,
            routers,
            {worker.name: f"{worker.name}:0" for worker in self.workers},
            SupervisionConfig(max_restarts=5),
            clock=self.clock,
            sleep=self.clock.sleep,
        )

    @property
    def pauses(self):
        """How long it waited before each start."""
        return [seconds for seconds in self.clock.slept if seconds != POLL_S]

    async def worker_has_started_twice(self):
        """For a router that takes long to end."""
        while self.workers[0].starts < 2:  # noqa: ASYNC110 - as many turns as the worker needs
            await asyncio.sleep(0)

    async def play(self, on_away=lambda away: None):
        async with asyncio.timeout(10):
            try:
                await self.supervisor.run(self.said.append, on_away)
            except* Finished:
                pass


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("actor_died", "its process ended"),
        ("engine_died", "its engine process was ended by SIGILL"),
        ("stalled", "its engine has work and makes no step"),
        ("unreachable", "it does not answer"),
        ("cut_off", "it answers, but there is no connection between it and the router"),
    ],
)
async def test_what_is_left_of_a_lost_worker_ends_before_it_starts_again_and_the_router_is_told_why(why, words):
    scene = Scene(worker_2=["", "", why])
    await scene.play()
    assert scene.log == ["end worker-2", "start worker-2", f"replace worker-2:1 {why}"]
    gone, back = scene.said
    assert gone == f"worker-2 is gone ({words}); restarting"
    assert back.startswith("worker-2: back after 1")


async def test_a_worker_that_drained_goes_for_good_once_nobody_has_its_kv_cache_open():
    scene = Scene(worker_2=["", "draining", "draining", "drained"])
    await scene.play()
    assert scene.log == ["remove worker-2", "retire worker-2"]
    assert scene.said == ["worker-2 drains", "worker-2 has drained and is gone"]


FOUR = ("prefill", "prefill", "decode", "decode")
AGAIN = ["end worker-2", "start worker-2"]


@pytest.mark.parametrize(
    ("pools", "health", "router", "log"),
    [
        (FOUR, {"worker_1": ["draining", "actor_died"]}, {}, ["remove worker-1", "retire worker-1"]),
        (FOUR, {"worker_1": ["draining", "engine_died"]}, {}, ["remove worker-1", "retire worker-1"]),
        (FOUR, {"worker_1": ["draining", "unreachable"]}, {}, ["remove worker-1", "retire worker-1"]),
        (
            FOUR,
            {"worker_1": ["draining"] * 5 + ["drained"]},
            {"partitioned": ("worker-1:0",)},
            ["remove worker-1", "retire worker-1"],
        ),
        (FOUR[1:3], {"worker_1": ["draining", "drained"]}, {}, ["remove worker-1", "retire worker-1"]),
        (FOUR[1:3], {"worker_0": ["draining", "drained"]}, {}, ["remove worker-0", "retire worker-0"]),
        (FOUR, {"worker_2": ["actor_died"]}, {"gone_for": 3}, [*AGAIN, "replace worker-2:1 actor_died"]),
        (
            FOUR,
            {"worker_2": ["actor_died"]},
            {"not_reached": MAX_REGISTRATIONS},
            [*AGAIN, *AGAIN, "replace worker-2:2 actor_died"],
        ),
        (FOUR, {}, {"partitioned": ("worker-2:0",)}, [*AGAIN, "replace worker-2:1 cut_off"]),
        (
            ("colocated",),
            {},
            {"partitioned": ("worker-0:0",)},
            ["end worker-0", "start worker-0", "replace worker-0:1 cut_off"],
        ),
        (
            FOUR,
            {"router": ["actor_died"]},
            {"missed": ("worker-1:0",)},
            [
                "end router",
                "start router with ['worker-0:0', 'worker-1:0', 'worker-2:0', 'worker-3:0']",
                "replace worker-1:0 None",
            ],
        ),
    ],
    ids=[
        "whose_process_dies_while_it_drains_is_not_started_again",
        "whose_engine_dies_while_it_drains_is_not_started_again",
        "that_falls_silent_while_it_drains_is_not_started_again",
        "that_drains_and_cannot_be_reached_has_left",
        "may_be_the_last_that_decodes_and_leave",
        "may_be_the_last_that_prefills_and_leave",
        "that_comes_back_while_the_router_is_gone_is_told_to_the_next_router",
        "that_the_router_never_reaches_is_taken_for_broken_in_the_end",
        "that_only_the_router_does_not_reach_is_replaced",
        "that_is_the_only_one_and_cut_off_is_replaced_and_not_the_router",
        "that_the_only_router_missed_at_its_start_is_registered_and_not_ended",
    ],
)
async def test_a_worker(pools, health, router, log):
    scene = Scene(pools, **health)
    vars(scene.router).update(router)
    await scene.play()
    assert scene.log == log


async def test_a_start_that_fails_is_tried_again_later_and_later():
    scene = Scene(worker_2=["engine_died"])
    scene.workers[2].refuses = DeploymentFailed("no memory")
    await scene.play()
    assert scene.log == [*["end worker-2", "start worker-2"] * 2, "replace worker-2:1 engine_died"]
    assert scene.said[1] == "worker-2 could not be brought back: no memory"
    assert scene.pauses == [0.0, 1.0]
    assert scene.said[2].startswith("worker-2: back after ")


async def test_a_worker_lost_again_and_again_is_tried_again_later_and_later_and_all_are_told():
    scene = Scene(worker_2=["engine_died"] * 11)
    told = []
    await scene.play(told.append)
    assert scene.log.count("start worker-2") == 11
    assert "retire worker-2" not in scene.log
    assert scene.pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 30.0, 60.0, 120.0, 240.0, 300.0, 300.0]
    [first, *_] = [said for said in scene.said if "more than 5 times" in said]
    assert first == "worker-2 was lost more than 5 times within 300 s of service and is tried again in 30 s"
    assert is_quoted(first)
    away = {
        "worker-2": "in restart back-off: lost more than 5 times within 300 s of service; next try after 30 s, at most "
        "5 min apart. serve's log says why."
    }
    assert told[:2] == [away, {}]
    assert told[-1] == {}, "it is back"
    assert any("worker-2" in noted for noted in scene.router.noted)
    assert scene.router.noted[-1] == {}


async def test_a_worker_that_takes_minutes_to_start_and_dies_at_its_first_request_is_tried_less_and_less_often_too():
    scene = Scene(worker_2=["engine_died"] * 9)
    scene.workers[2].start_s = 240.0
    await scene.play()
    assert scene.pauses[5:] == [30.0, 60.0, 120.0, 240.0]


async def test_the_only_worker_that_cannot_be_started_for_long_is_not_given_up():
    scene = Scene(("colocated",), worker_0=["engine_died"])
    worker = scene.workers[0]
    worker.start_again, start_again = refusing(8), worker.start_again

    async def mended():
        worker.start_again = start_again
        return await start_again()

    worker.start_again.then = mended
    await scene.play()
    assert scene.log[-1] == "replace worker-0:1 engine_died"


async def test_cores_that_are_not_free_yet_do_not_count_as_a_start_and_are_said_once():
    scene = Scene(worker_2=["engine_died"])
    scene.workers[2].start_again, start_again = refusing(20, CoresBusy("core 1 is taken")), scene.workers[2].start_again
    scene.workers[2].start_again.then = start_again
    await scene.play()
    assert scene.log[-1] == "replace worker-2:1 engine_died"
    assert set(scene.pauses) == {0.0}
    assert scene.said.count("worker-2 could not be brought back: core 1 is taken") == 1


async def test_cores_that_another_deployment_has_taken_are_tried_less_and_less_often_and_all_are_told():
    scene = Scene(worker_2=["engine_died"])
    told = []

    async def taken():
        scene.log.append("start worker-2")
        scene.clock.now_s += 10.0  # cluster.node_cores waits so long
        raise CoresBusy("core 1 is taken")

    scene.workers[2].start_again = taken
    scene.router.idle_polls = -1000
    await scene.play(told.append)
    assert scene.pauses[:14] == [*[0.0] * 7, 1.0, 2.0, 4.0, 8.0, 30.0, 60.0, 120.0]
    assert "worker-2" in told[-1]


async def test_a_worker_for_which_there_is_no_node_is_waited_for_and_not_given_up():
    scene = Scene(worker_2=["actor_died"])
    scene.workers[2].places = [NoPlace("Ray found no place for worker-2 within 120 s") for _ in range(20)]
    await scene.play()
    assert scene.log == ["end worker-2", "start worker-2", "replace worker-2:1 actor_died"]
    assert scene.said[1] == "worker-2 waits for a node: Ray found no place for worker-2 within 120 s"
    assert is_quoted(scene.said[1])
    assert [sentence for sentence in scene.said if "waits" in sentence] == scene.said[1:2]


async def test_a_newcomer_that_the_router_does_not_reach_in_time_is_kept_and_registered_again():
    scene = Scene(worker_2=["actor_died"])
    scene.router.not_reached = 5
    await scene.play()
    assert scene.log == ["end worker-2", "start worker-2", "replace worker-2:1 actor_died"]
    [told] = [sentence for sentence in scene.said if "runs, but router cannot connect to it yet" in sentence]
    assert "no connection within 30 s" in told


async def test_a_newcomer_that_dies_while_it_is_registered_is_started_again():
    scene = Scene(worker_2=["actor_died", "engine_died"])
    scene.router.not_reached = MAX_REGISTRATIONS - 1
    await scene.play()
    assert scene.log == [*["end worker-2", "start worker-2"] * 2, "replace worker-2:2 engine_died"]
    words = "its engine process was ended by SIGILL"
    assert f"worker-2 is gone again before it could be given work ({words}); restarting" in scene.said
    [back] = [said for said in scene.said if "back after" in said]
    assert back == scene.said[-1], "it was not back before"


async def test_a_cut_off_worker_that_has_no_news_is_not_waited_for():
    scene = Scene()

    async def failure(known=None):
        if known is None:
            return ""
        scene.router.partitioned = ("worker-2:0",)  # while it is waited for
        return await asyncio.Event().wait()

    scene.workers[2].failure = failure
    await scene.play()
    assert scene.log == ["end worker-2", "start worker-2", "replace worker-2:1 cut_off"]


async def test_a_router_that_reaches_none_of_its_workers_is_what_is_replaced():
    scene = Scene(("prefill", "decode"))
    scene.router.partitioned = ("worker-0:0", "worker-1:0")
    start_again = scene.router.start_again

    async def mended(addresses):
        scene.router.partitioned = ()
        await start_again(addresses)

    scene.router.start_again = mended
    await scene.play()
    assert scene.log == ["end router", "start router with ['worker-0:0', 'worker-1:0']"]


async def test_when_the_last_worker_has_left_on_purpose_the_deployment_ends():
    scene = Scene(("prefill", "decode"), worker_0=["", "draining", "drained"], worker_1=["draining", "drained"])
    with pytest.raises(DeploymentFailed, match=r"worker-. has drained and is gone; it was the last worker"):
        await scene.play()


async def test_the_last_replica_may_be_lost_as_long_as_it_comes_back():
    scene = Scene(("colocated",), worker_0=["actor_died"])
    await scene.play()
    assert scene.said[-1] == "worker-0: back after 14 s"


async def test_a_router_that_died_serves_again_with_the_workers_there_are_now():
    scene = Scene(router=["", "actor_died"])
    await scene.play()
    assert scene.log == [
        "end router",
        "start router with ['worker-0:0', 'worker-1:0', 'worker-2:0', 'worker-3:0']",
    ]
    assert scene.said[0] == "router is gone (its process ended); restarting"
    assert scene.said[1].startswith("router: back after ")


async def test_a_router_lost_together_with_every_worker_starts_with_the_first_one_that_is_back():
    scene = Scene(("colocated",), worker_0=["actor_died"], router=["actor_died"])
    await scene.play()
    assert scene.log.index("start worker-0") < scene.log.index("start router with ['worker-0:1']")
    assert scene.log[-1] == "replace worker-0:1 actor_died"
    assert "could not be brought back" not in " ".join(scene.said)
    assert [sentence.split(":")[0] for sentence in scene.said[-2:]] == ["router", "worker-0"]


async def test_a_worker_lost_again_before_the_router_is_back_is_started_again_and_not_what_the_router_gets():
    scene = Scene(("colocated",), worker_0=["actor_died", "engine_died"], router=["actor_died"])
    scene.router.end = scene.worker_has_started_twice
    await scene.play()
    assert scene.log == [
        *("end worker-0", "start worker-0", "end worker-0", "start worker-0"),
        *("start router with ['worker-0:2']", "replace worker-0:2 engine_died"),
    ]


async def test_a_worker_that_the_router_refuses_is_not_what_the_next_router_starts_with():
    scene = Scene(("decode", "decode"), worker_0=["actor_died"])
    scene.router.refuses = DeploymentFailed("router could not replace_worker: WorkerLost: it is gone")
    scene.workers[0].end = lambda: held(scene)
    await scene.play()
    assert scene.held == [["worker-1:0"], ["worker-1:0"]]


async def held(scene):
    """Note the addresses there are while a worker is away."""
    scene.held = [*getattr(scene, "held", []), list(scene.supervisor._addresses.values())]


async def test_a_router_lost_again_and_again_is_tried_again_every_half_minute():
    scene = Scene(router=["actor_died"] * 9)
    await scene.play()
    assert "router was lost more than 5 times within 300 s of service and is tried again in 30 s" in scene.said
    assert scene.pauses[5:] == [30.0] * 4
    assert scene.said[-1].startswith("router: back after ")


def test_delays_grow_up_to_five_minutes_and_old_starts_are_forgotten():
    clock = Clock()
    budget = RestartBudget(5, clock)
    delays_s = [budget.next_delay_s() for _ in range(12)]
    assert delays_s == [0.0, 1.0, 2.0, 4.0, 8.0, 30.0, 60.0, 120.0, 240.0, 300.0, 300.0, 300.0]
    assert budget.used_up
    clock.now_s = 1000.0
    assert budget.next_delay_s() == 300.0, "all of that it did not serve"
    budget.serves()
    clock.now_s = 1299.0
    assert budget.next_delay_s() == 300.0
    budget.serves()
    clock.now_s = 1301.0
    assert budget.next_delay_s() < 300.0
    budget.serves()
    clock.now_s = 1700.0
    assert budget.next_delay_s() == 0.0
    assert not budget.used_up


def test_delays_stay_finite_however_often_it_was_tried():
    budget = RestartBudget(5, Clock(), longest_rest_s=30.0)
    assert {budget.next_delay_s() for _ in range(5000)} == {0.0, 1.0, 2.0, 4.0, 8.0, 30.0}


# --- several routers


class Dispatcher(Router):
    kind = "dispatcher"


def with_two_routers(scene, **health):
    """The scene with two routers and their dispatcher."""
    scene.supervise(
        [
            Router("router-0", scene.log, scene.clock, health.get("first", ())),
            Router("router-1", scene.log, scene.clock, health.get("second", ())),
            Dispatcher("dispatcher", scene.log, scene.clock, health.get("dispatcher", ())),
        ]
    )
    return scene


async def test_a_new_incarnation_is_registered_to_all_routers_and_last_to_the_dispatcher():
    scene = with_two_routers(Scene(worker_2=["engine_died"]))
    seen = []
    for router in scene.routers:

        async def replace_worker(address, reason, name=router.name):
            seen.append((name, address, reason))

        router.replace_worker = replace_worker
    await scene.play()
    assert seen == [(name, "worker-2:1", "engine_died") for name in ("router-0", "router-1", "dispatcher")]


@pytest.mark.parametrize(("name", "lost"), [("first", "router-0"), ("dispatcher", "dispatcher")])
async def test_one_of_several_that_dies_again_and_again_is_tried_again_and_the_others_serve_on(name, lost):
    scene = with_two_routers(Scene(), **{name: ["actor_died"] * 8})
    await scene.play()
    assert f"{lost} was lost more than 5 times within 300 s of service and is tried again in 30 s" in scene.said
    assert scene.said[-1].startswith(f"{lost}: back after ")


async def test_a_worker_that_most_routers_do_not_reach_is_replaced():
    scene = with_two_routers(Scene())
    for router in scene.routers[1:]:
        router.partitioned = ("worker-3:0",)
    await scene.play()
    assert scene.log[:2] == ["end worker-3", "start worker-3"]


async def test_workers_that_one_of_several_routers_does_not_reach_are_left_alone_and_the_router_is_the_suspect():
    scene = with_two_routers(Scene())
    scene.routers[1].partitioned = ("worker-2:0", "worker-3:0")
    await scene.play()
    assert scene.log == []
    [told] = scene.said
    assert told.startswith("router-1 does not reach worker-2, worker-3, which others do")
    assert is_quoted(told)


async def test_a_router_that_reaches_again_what_the_others_reach_is_no_suspect_any_more():
    scene = with_two_routers(Scene())
    scene.routers[1].partitioned = ("worker-2:0", "worker-3:0")
    scene.routers[1].unreached = heals(scene.routers[1])
    await scene.play()
    assert scene.log == []
    assert scene.said[-1] == "router-1 reaches what the others reach again"


def heals(router, after=5):
    looks = iter([*[router.partitioned] * after])

    async def unreached(for_s):
        return list(next(looks, ()))

    return unreached


async def test_of_several_workers_that_nobody_reaches_one_at_a_time_is_started_again():
    scene = Scene(("decode",) * 6)
    scene.router.partitioned = tuple(f"worker-{number}:0" for number in range(3))
    scene.router.not_reached = 3
    away: list[int] = []
    scene.clock.sleep = noting(scene, away)
    scene.supervisor._sleep = scene.clock.sleep
    await scene.play()
    assert [line for line in scene.log if line.startswith("start")] == [f"start worker-{number}" for number in range(3)]
    assert max(away) == 1


async def test_a_cut_off_worker_that_then_waits_for_a_node_keeps_no_other_from_being_mended():
    scene = Scene(("decode",) * 6)
    scene.router.partitioned = ("worker-0:0", "worker-1:0")
    scene.workers[0].places = [NoPlace("Ray found no place for worker-0")] * 1000
    await scene.play()
    assert "start worker-0" not in scene.log
    assert scene.log[-1] == "replace worker-1:1 cut_off"


async def test_a_cut_off_worker_that_takes_longer_to_start_than_it_may_keeps_no_other_from_being_mended():
    scene = Scene(("decode",) * 6)
    scene.router.partitioned = ("worker-0:0", "worker-1:0")

    async def never():
        await asyncio.Event().wait()

    scene.workers[0].start_again = never
    scene.clock.sleep = partial(in_minutes, scene)
    scene.supervisor._sleep = scene.clock.sleep
    await scene.play()
    assert scene.log[-1] == "replace worker-1:1 cut_off"


async def in_minutes(scene, seconds):
    scene.clock.now_s += 60.0
    await asyncio.sleep(0)


def noting(scene, away):
    sleep = scene.clock.sleep

    async def noted(seconds):
        away.append(6 - len(scene.supervisor._addresses))
        await sleep(seconds)

    return noted


async def test_a_newcomer_serves_with_the_router_that_reaches_it_and_the_others_are_asked_on():
    scene = with_two_routers(Scene(worker_2=["engine_died"]))
    scene.routers[0].not_reached = 200
    seen = []
    for router in scene.routers:
        router.idle_polls = -400

    async def replace_worker(address, reason, name="router-1"):
        seen.append((name, address, reason))

    scene.routers[1].replace_worker = replace_worker
    scene.routers[2].replace_worker = partial(replace_worker, name="dispatcher")
    await scene.play()
    assert seen == [(name, "worker-2:1", "engine_died") for name in ("router-1", "dispatcher")]
    assert scene.workers[2].starts == 1
    back = next(index for index, said in enumerate(scene.said) if said.startswith("worker-2: back after"))
    assert back <= 2, "it serves before the other router has it"
    assert scene.log[-1] == "replace worker-2:1 engine_died"


async def test_a_router_with_a_fault_of_its_own_keeps_no_newcomer_from_the_others():
    scene = with_two_routers(Scene(worker_2=["engine_died"]))
    fault = DeploymentFailed("router-0 could not replace_worker: TlsFileError: security.tls.key cannot be read")
    scene.routers[0].refuses = fault

    async def replace_worker(address, reason):
        while scene.routers[0].refuses is not None:  # noqa: ASYNC110 - it takes longer than to refuse
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        scene.log.append("router-1 has it")

    scene.routers[1].replace_worker = replace_worker
    await scene.play()
    assert scene.log[:3] == ["end worker-2", "start worker-2", "router-1 has it"]
    assert "start worker-2" not in scene.log[3:]
    assert f"router-0 cannot take in worker-2 and is asked again every 30 s: {fault}" in scene.said
    assert scene.log.count("replace worker-2:1 engine_died") == 2, "the dispatcher, and router-0 once it is mended"


async def test_a_loaded_worker_is_kept_while_no_router_serves():
    scene = Scene()
    serves = {"router": asyncio.Event()}
    registration = Registration(
        "worker-0",
        "worker-0:1",
        "engine_died",
        routers={"router": scene.router},
        serves=serves,
        say=scene.said.append,
        sleep=scene.clock.sleep,
    )
    scene.router.not_reached = MAX_REGISTRATIONS - 1
    serves["router"].set()
    registering = asyncio.create_task(registration.to(scene.router))
    await registration.changed(1.0)
    serves["router"].clear()  # it died and is started again
    registration.check()
    serves["router"].set()
    await registering
    assert registration.enough


@pytest.mark.parametrize(
    ("name", "index", "tries"),
    [("first", 0, 0), ("dispatcher", 2, 0), ("first", 0, MAX_REGISTRATIONS + 5)],
    ids=["of_several", "dispatcher", "when_its_route_heals"],
)
async def test_what_a_router_did_not_reach_when_it_started_is_registered_to_it(name, index, tries):
    scene = with_two_routers(Scene(), **{name: ["actor_died"]})
    scene.routers[index].missed, scene.routers[index].not_reached = ("worker-1:0",), tries
    await scene.play()
    assert scene.log[2:] == ["replace worker-1:0 None"]


async def test_routers_that_take_long_to_forget_a_worker_do_not_end_the_deployment():
    scene = Scene(worker_1=["draining", "drained"])
    refused = iter([DeploymentFailed("router did not finish remove_worker within 900 s")])
    remove_worker = scene.router.remove_worker

    async def late(worker_id):
        for error in refused:
            raise error
        await remove_worker(worker_id)

    scene.router.remove_worker = late
    await scene.play()
    assert scene.log == ["remove worker-1", "retire worker-1"]


# --- who is silent: they, or we


@pytest.mark.parametrize(("looks", "ended"), [(1, []), (2, ["end router", "end worker-0", "end worker-1"])])
async def test_when_most_fall_silent_at_once_a_second_look_decides(looks, ended):
    silent = ["", *["unreachable"] * looks]
    scene = Scene(("decode", "decode"), worker_0=silent, worker_1=silent, router=silent)
    await scene.play()
    assert sorted({line for line in scene.log if line.startswith("end")}) == ended
    assert bool(scene.log) == bool(scene.said) == bool(ended)


async def test_a_router_that_reaches_no_worker_is_the_one_that_is_cut_off():
    scene = with_two_routers(Scene())
    scene.routers[0].partitioned = tuple(f"worker-{number}:0" for number in range(4))
    scene.routers[0].health.extend([""] * 3)
    await scene.play()
    assert any(said.startswith("router-0 is gone (it answers, but there is no connection") for said in scene.said)
    assert not any("start worker" in line for line in scene.log)


# --- operations


async def test_a_worker_that_an_operator_wants_again_is_started_after_its_drain_and_counts_no_loss():
    scene = Scene(worker_1=["", "draining", "drained"])
    back = scene.supervisor.restart_drained("worker-1")
    await scene.play()
    assert back.done()
    assert back.exception() is None
    assert [line for line in scene.log if "worker-1" in line] == [
        "end worker-1",
        "start worker-1",
        "replace worker-1:1 ordered",
    ]
    assert any("worker-1 is gone (drained, to be started again); restarting" in said for said in scene.said)


async def test_a_restart_that_is_taken_back_before_the_drain_lets_the_worker_leave():
    scene = Scene(worker_1=["", "draining", "drained"])
    scene.supervisor.restart_drained("worker-1")
    assert await scene.supervisor.take_back_restart("worker-1")
    assert scene.supervisor.come_back == set()
    await scene.play()
    assert "start worker-1" not in scene.log


async def test_a_restart_cannot_be_taken_back_once_the_worker_drains():
    scene = Scene(worker_1=["draining", "draining", "drained"])
    back = scene.supervisor.restart_drained("worker-1")
    assert not await scene.supervisor.take_back_restart("worker-1")
    await scene.play()
    assert back.done()
    assert "start worker-1" in scene.log


async def test_a_worker_that_drains_for_a_restart_can_still_be_let_leave():
    scene = Scene(worker_1=["draining", "draining", "drained"])
    scene.supervisor.restart_drained("worker-1")
    scene.supervisor.let_leave("worker-1")
    await scene.play()
    assert "start worker-1" not in scene.log
    assert "retire worker-1" in scene.log


async def test_a_restart_cannot_be_taken_back_while_the_worker_is_being_started_again():
    scene = Scene(worker_1=["drained"])
    back = scene.supervisor.restart_drained("worker-1")
    worker, answers = scene.workers[1], []
    start = worker.start_again

    async def start_again():
        answers.append(await scene.supervisor.take_back_restart("worker-1"))
        return await start()

    worker.start_again = start_again
    await scene.play()
    assert answers == [False]
    assert back.done()


async def test_a_worker_that_is_added_is_registered_and_supervised():
    scene = Scene()
    running = asyncio.create_task(scene.play())
    await asyncio.sleep(0)
    new = Worker("worker-9", scene.log, scene.clock, ["engine_died"])
    await scene.supervisor.add(new, "worker-9:0")
    await running
    assert "replace worker-9:0 ordered" in scene.log
    assert "replace worker-9:1 engine_died" in scene.log


async def test_a_worker_that_is_refused_is_not_supervised():
    scene = Scene()
    running = asyncio.create_task(scene.play())
    await asyncio.sleep(0)
    scene.router.refuses = WorkerRefused("router could not replace_worker: PairingRefused: model")
    with pytest.raises(DeploymentFailed, match="PairingRefused"):
        await scene.supervisor.add(Worker("worker-9", scene.log, scene.clock), "worker-9:0")
    assert "worker-9" not in scene.supervisor.workers
    await running


async def test_a_worker_that_one_router_refuses_is_forgotten_by_those_that_had_taken_it():
    scene = with_two_routers(Scene())
    running = asyncio.create_task(scene.play())
    await asyncio.sleep(0)

    async def refuses(address, reason):
        raise WorkerRefused("dispatcher could not replace_worker: PairingRefused: model")

    scene.routers[2].replace_worker = refuses
    with pytest.raises(DeploymentFailed, match="PairingRefused"):
        await scene.supervisor.add(Worker("worker-9", scene.log, scene.clock), "worker-9:0")
    await running
    assert scene.log.count("replace worker-9:0 ordered") == 2
    assert scene.log.count("remove worker-9") == 3
    supervisor = scene.supervisor
    known = (supervisor._addresses, supervisor._partitioned, supervisor._registered, supervisor._mended_s)
    assert not any("worker-9" in names for names in known)


async def test_a_worker_that_waits_for_a_node_can_be_given_up_and_is_not_started_again():
    scene = Scene(worker_2=["actor_died"])
    scene.workers[2].places = [NoPlace("Ray found no place for worker-2") for _ in range(1000)]
    running = asyncio.create_task(scene.play())
    while not any("waits for a node" in said for said in scene.said):  # noqa: ASYNC110 - as many turns as that needs
        await asyncio.sleep(0)
    assert scene.supervisor.lost == {"worker-2"}
    await scene.supervisor.dismiss("worker-2")
    assert "worker-2" not in scene.supervisor.workers
    assert not scene.supervisor.lost
    scene.workers[2].places = []  # there is a node now
    await running
    assert scene.log == ["end worker-2", "remove worker-2", "retire worker-2"]
    assert scene.said[-1] == "worker-2 was given up, as ordered, and is not started again"
    await scene.supervisor.dismiss("worker-2")  # a second time does nothing


async def test_a_worker_that_nobody_wants_any_more_while_it_is_registered_is_not_supervised():
    scene = Scene()
    running = asyncio.create_task(scene.play())
    await asyncio.sleep(0)
    scene.router.not_reached = MAX_REGISTRATIONS
    adding = asyncio.create_task(scene.supervisor.add(Worker("worker-9", scene.log, scene.clock), "worker-9:0"))
    await asyncio.sleep(0)
    adding.cancel()
    await asyncio.wait((adding,))
    assert "worker-9" not in scene.supervisor.workers
    await running
