"""What is brought back, when, how often, and who is told: the supervisor with actors and a clock that are none."""

import asyncio
from collections import deque
from functools import partial

import pytest

from ridgeline.cluster.config.models import SupervisionConfig
from ridgeline.cluster.runtime.handles.actor import ActorGone, DeploymentFailed, NoPlace, NotReached, WorkerRefused
from ridgeline.cluster.runtime.registration import MAX_REGISTRATIONS, Registration
from ridgeline.cluster.runtime.supervisor import LOOK_S, POLL_S, RestartBudget, Supervisor
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

    async def failure(self):
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
    fails = 0

    async def start_again(self):
        if self.places:
            raise self.places.pop()
        self.log.append(f"start {self.name}")
        self.clock.now_s += self.start_s
        if self.fails:
            self.fails -= 1
            raise DeploymentFailed("no memory")
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
        """How long it waited before each start, but for the second one: that is as long as between two looks."""
        return [seconds for seconds in self.clock.slept if seconds not in (LOOK_S, POLL_S)]

    @property
    def starts(self):
        return [line for line in self.log if line.startswith("start worker")]

    async def turns_until(self, condition):
        while not condition():  # noqa: ASYNC110 - as many turns as that needs
            await asyncio.sleep(0)

    async def play(self, on_away=lambda away: None):
        async with asyncio.timeout(10):
            try:
                await self.supervisor.run(self.said.append, on_away)
            except* Finished:
                pass


def case(name, log, *said, pools=("prefill", "prefill", "decode", "decode"), router=(), worker=(), **health):
    """What each actor answers, what the router and the worker of this name are, and what happens and is said then."""
    return pytest.param(pools, health, dict(router), dict(worker), log, said, id=name)


NO_NODE = NoPlace("Ray found no place for worker-2 within 120 s")
PAIR, ONE = ("prefill", "decode"), ("colocated",)
AGAIN, BACK = ["end worker-2", "start worker-2"], "replace worker-2:1 actor_died"
LEFT = ["remove worker-1", "retire worker-1"]
ALL = "['worker-0:0', 'worker-1:0', 'worker-2:0', 'worker-3:0']"


@pytest.mark.parametrize(
    ("pools", "health", "router", "worker", "log", "said"),
    [
        case("dies_and_is_back", [*AGAIN, BACK], "(its process ended)", "worker-2: back", worker_2=["", "actor_died"]),
        case(
            "engine_dies",
            [*AGAIN, "replace worker-2:1 engine_died"],
            "ended by SIGILL",
            worker_2=["", "engine_died"],
        ),
        case("stalls", [*AGAIN, "replace worker-2:1 stalled"], "makes no step", worker_2=["", "stalled"]),
        case("falls_silent", [*AGAIN, "replace worker-2:1 unreachable"], worker_2=["", "unreachable"]),
        case("is_cut_off", [*AGAIN, "replace worker-2:1 cut_off"], router={"partitioned": ("worker-2:0",)}),
        case(
            "is_the_only_one_and_cut_off",
            ["end worker-0", "start worker-0", "replace worker-0:1 cut_off"],
            pools=ONE,
            router={"partitioned": ("worker-0:0",)},
        ),
        case("drains_and_leaves", LEFT, "worker-1 drains", "has drained", worker_1=["", "draining", "drained"]),
        case("process_dies_while_it_drains", LEFT, worker_1=["draining", "actor_died"]),
        case("engine_dies_while_it_drains", LEFT, worker_1=["draining", "engine_died"]),
        case("falls_silent_while_it_drains", LEFT, worker_1=["draining", "unreachable"]),
        case(
            "drains_and_cannot_be_reached",
            LEFT,
            router={"partitioned": ("worker-1:0",)},
            worker_1=["draining"] * 5 + ["drained"],
        ),
        case("is_the_last_that_decodes_and_leaves", LEFT, pools=PAIR, worker_1=["draining", "drained"]),
        case(
            "is_the_last_that_prefills_and_leaves",
            ["remove worker-0", "retire worker-0"],
            pools=PAIR,
            worker_0=["draining", "drained"],
        ),
        case(
            "is_the_last_replica_and_lost",
            ["end worker-0", "start worker-0", "replace worker-0:1 actor_died"],
            "worker-0: back after 1",
            pools=ONE,
            worker_0=["actor_died"],
        ),
        case("comes_back_while_the_router_is_gone", [*AGAIN, BACK], router={"gone_for": 3}, worker_2=["actor_died"]),
        case(
            "is_reached_late",
            [*AGAIN, BACK],
            "router cannot connect to it yet",
            router={"not_reached": 5},
            worker_2=["actor_died"],
        ),
        case(
            "is_never_reached",
            [*AGAIN, *AGAIN, "replace worker-2:2 actor_died"],
            router={"not_reached": MAX_REGISTRATIONS},
            worker_2=["actor_died"],
        ),
        case(
            "dies_while_it_is_registered",
            [*AGAIN, *AGAIN, "replace worker-2:2 engine_died"],
            "gone again before it could be given work",
            router={"not_reached": MAX_REGISTRATIONS - 1},
            worker_2=["actor_died", "engine_died"],
        ),
        case(
            "cannot_be_started_the_first_time",
            [*AGAIN, *AGAIN, BACK],
            "could not be brought back: no memory",
            worker={"fails": 1},
            worker_2=["actor_died"],
        ),
        case(
            "cannot_be_started_for_long",
            ["end worker-0", "start worker-0"] * 8 + ["end worker-0", "start worker-0", "replace worker-0:1 stalled"],
            pools=ONE,
            worker={"name": "worker-0", "fails": 8},
            worker_0=["stalled"],
        ),
        case(
            "has_no_node",
            [*AGAIN, BACK],
            f"worker-2 waits for a node: {NO_NODE}",
            worker={"places": [NO_NODE] * 20},
            worker_2=["actor_died"],
        ),
        case(
            "was_missed_by_the_router_at_its_start",
            ["end router", f"start router with {ALL}", "replace worker-1:0 None"],
            router={"missed": ("worker-1:0",)},
            router_=["actor_died"],
        ),
        case(
            "serves_on_while_the_router_is_started_again",
            ["end router", f"start router with {ALL}"],
            "router is gone (its process ended)",
            "router: back",
            router_=["", "actor_died"],
        ),
    ],
)
async def test_a_worker_that(pools, health, router, worker, log, said):
    scene = Scene(pools, **{name.removesuffix("_"): answers for name, answers in health.items()})
    vars(scene.router).update(router)
    name = worker.pop("name", "worker-2")
    for one in scene.workers:
        vars(one).update(worker if one.name == name else {})
    await scene.play()
    assert scene.log == log
    told = iter(scene.said)
    assert all(any(part in sentence for sentence in told) for part in said), scene.said


async def test_a_worker_without_a_node_is_told_once_and_in_the_words_of_the_guide():
    scene = Scene(worker_2=["actor_died"])
    scene.workers[2].places = [NO_NODE] * 20
    await scene.play()
    [told] = [sentence for sentence in scene.said if "waits" in sentence]
    assert is_quoted(told)


async def test_a_worker_lost_again_and_again_is_tried_again_later_and_later_and_all_are_told():
    scene, told = Scene(worker_2=["engine_died"] * 11), []
    await scene.play(told.append)
    assert (len(scene.starts), "retire worker-2" in scene.log) == (11, False)
    assert scene.pauses == [0.0, 2.0, 4.0, 8.0, 30.0, 60.0, 120.0, 240.0, 300.0, 300.0]
    assert is_quoted(next(said for said in scene.said if "more than 5 times" in said))
    assert "next try after 30 s" in told[0]["worker-2"]
    assert (told[1], told[-1]) == ({}, {}), "it is back"
    assert any("worker-2" in noted for noted in scene.router.noted)
    assert scene.router.noted[-1] == {}


async def test_a_worker_that_takes_minutes_to_start_and_dies_at_once_is_tried_less_and_less_often_too():
    scene = Scene(worker_2=["engine_died"] * 9)
    scene.workers[2].start_s = 240.0
    await scene.play()
    assert scene.pauses[4:] == [30.0, 60.0, 120.0, 240.0]


async def test_a_router_that_reaches_none_of_its_workers_is_what_is_replaced():
    scene = Scene(PAIR)
    scene.router.partitioned = ("worker-0:0", "worker-1:0")
    start_again = scene.router.start_again

    async def mended(addresses):
        scene.router.partitioned = ()
        await start_again(addresses)

    scene.router.start_again = mended
    await scene.play()
    assert scene.log == ["end router", "start router with ['worker-0:0', 'worker-1:0']"]


async def test_when_the_last_worker_has_left_on_purpose_the_deployment_ends():
    scene = Scene(PAIR, worker_0=["", "draining", "drained"], worker_1=["draining", "drained"])
    with pytest.raises(DeploymentFailed, match="last worker"):
        await scene.play()


async def test_a_router_lost_together_with_every_worker_starts_with_the_first_one_that_is_back():
    scene = Scene(ONE, worker_0=["actor_died"], router=["actor_died"])
    await scene.play()
    assert scene.log.index("start worker-0") < scene.log.index("start router with ['worker-0:1']")
    assert scene.log[-1] == "replace worker-0:1 actor_died"
    assert [sentence.split(":")[0] for sentence in scene.said[-2:]] == ["router", "worker-0"]


async def test_a_worker_lost_again_before_the_router_is_back_is_started_again_and_not_what_the_router_gets():
    scene = Scene(ONE, worker_0=["actor_died", "engine_died"], router=["actor_died"])
    scene.router.end = partial(scene.turns_until, lambda: scene.workers[0].starts == 2)
    await scene.play()
    assert scene.log == [
        *("end worker-0", "start worker-0") * 2,
        *("start router with ['worker-0:2']", "replace worker-0:2 engine_died"),
    ]


async def test_a_worker_that_the_router_refuses_does_not_run():
    scene, lost = Scene(("decode", "decode"), worker_0=["actor_died"]), []
    scene.router.refuses = DeploymentFailed("router could not replace_worker: WorkerLost: it is gone")

    async def end():
        lost.append(scene.supervisor.lost)

    scene.workers[0].end = end
    await scene.play()
    assert lost == [{"worker-0"}, {"worker-0"}]


async def test_a_router_lost_again_and_again_is_tried_again_every_half_minute():
    scene = Scene(router=["actor_died"] * 9)
    await scene.play()
    assert any(said.startswith("router was lost more than 5 times") for said in scene.said)
    assert scene.pauses[4:] == [30.0] * 4


def test_delays_grow_up_to_five_minutes_and_old_starts_are_forgotten():
    clock = Clock()
    budget = RestartBudget(5, clock)
    delays_s = [budget.next_delay_s() for _ in range(12)]
    assert delays_s == [0.0, 1.0, 2.0, 4.0, 8.0, 30.0, 60.0, 120.0, 240.0, 300.0, 300.0, 300.0]
    assert budget.used_up
    clock.now_s = 1000.0
    assert budget.next_delay_s() == 300.0, "all of that it did not serve"
    for served_until_s, longest_s in ((1299.0, 300.0), (1301.0, 299.0), (1700.0, 0.0)):
        budget.serves()
        clock.now_s = served_until_s
        assert (delay_s := budget.next_delay_s()) <= longest_s
        assert delay_s == 300.0 or served_until_s > 1299.0
    assert not budget.used_up


def test_delays_stay_finite_however_often_it_was_tried():
    budget = RestartBudget(5, Clock(), longest_rest_s=30.0)
    assert {budget.next_delay_s() for _ in range(5000)} == {0.0, 1.0, 2.0, 4.0, 8.0, 30.0}


# --- several routers


class Dispatcher(Router):
    kind = "dispatcher"


def with_two_routers(scene, **health):
    """The scene with two routers and their dispatcher."""
    kinds = {"router-0": Router, "router-1": Router, "dispatcher": Dispatcher}
    told = {name.replace("_", "-"): answers for name, answers in health.items()}
    scene.supervise([kind(name, scene.log, scene.clock, told.get(name, ())) for name, kind in kinds.items()])
    return scene


def noted(router, seen):
    """Have it note what it is told of."""

    async def replace_worker(address, reason):
        seen.append((router.name, address, reason))

    router.replace_worker = replace_worker


async def test_a_new_incarnation_is_registered_to_all_routers_and_last_to_the_dispatcher():
    scene, seen = with_two_routers(Scene(worker_2=["engine_died"])), []
    for router in scene.routers:
        noted(router, seen)
    await scene.play()
    assert seen == [(name, "worker-2:1", "engine_died") for name in ("router-0", "router-1", "dispatcher")]


@pytest.mark.parametrize("lost", ["router-0", "dispatcher"])
async def test_one_of_several_that_dies_again_and_again_is_tried_again_and_the_others_serve_on(lost):
    scene = with_two_routers(Scene(), **{lost.replace("-", "_"): ["actor_died"] * 8})
    await scene.play()
    assert any(said.startswith(f"{lost} was lost more than 5 times") for said in scene.said)
    assert scene.said[-1].startswith(f"{lost}: back after ")


async def test_a_worker_that_most_routers_do_not_reach_is_replaced():
    scene = with_two_routers(Scene())
    for router in scene.routers[1:]:
        router.partitioned = ("worker-3:0",)
    await scene.play()
    assert scene.log[:2] == ["end worker-3", "start worker-3"]


@pytest.mark.parametrize("heals", [False, True])
async def test_workers_that_one_of_several_routers_does_not_reach_are_left_alone_and_the_router_is_the_suspect(heals):
    scene, router = with_two_routers(Scene()), None
    router = scene.routers[1]
    router.partitioned = ("worker-2:0", "worker-3:0")
    looks = iter([router.partitioned] * (5 if heals else 1000))

    async def unreached(for_s):
        return list(next(looks, ()))

    router.unreached = unreached
    await scene.play()
    assert scene.log == []
    told, *later = scene.said
    assert is_quoted(told)
    assert later == (["router-1 reaches what the others reach again"] if heals else [])


async def test_of_several_workers_that_nobody_reaches_one_at_a_time_is_started_again():
    scene, away = Scene(("decode",) * 6), []
    sleep = scene.clock.sleep

    async def noting(seconds):
        away.append(len(scene.supervisor.lost))
        await sleep(seconds)

    scene.clock.sleep = noting
    scene.supervise([scene.router])
    scene.router.partitioned = tuple(f"worker-{number}:0" for number in range(3))
    scene.router.not_reached = 3
    await scene.play()
    assert scene.starts == [f"start worker-{number}" for number in range(3)]
    assert max(away) == 1


@pytest.mark.parametrize("waits", ["for_a_node", "longer_than_a_start_may_take"])
async def test_a_cut_off_worker_that_does_not_come_back_keeps_no_other_from_being_mended(waits):
    scene = Scene(("decode",) * 6)

    async def in_minutes(seconds):
        scene.clock.now_s += 60.0
        await asyncio.sleep(0)

    if waits == "for_a_node":
        scene.workers[0].places = [NO_NODE] * 1000
    else:
        scene.workers[0].start_again = asyncio.Event().wait
        scene.clock.sleep = in_minutes
        scene.supervise([scene.router])
    scene.router.partitioned = ("worker-0:0", "worker-1:0")
    await scene.play()
    assert "start worker-0" not in scene.log
    assert scene.log[-1] == "replace worker-1:1 cut_off"


async def test_a_newcomer_serves_with_the_router_that_reaches_it_and_the_others_are_asked_on():
    scene, seen = with_two_routers(Scene(worker_2=["engine_died"])), []
    scene.routers[0].not_reached = 200
    for one in (*scene.routers, *scene.workers):
        one.idle_polls = -1000
    for router in scene.routers[1:]:
        noted(router, seen)
    await scene.play()
    assert seen == [(name, "worker-2:1", "engine_died") for name in ("router-1", "dispatcher")]
    assert scene.workers[2].starts == 1
    back = next(index for index, said in enumerate(scene.said) if said.startswith("worker-2: back after"))
    assert back <= 2, "it serves before the other router has it"
    assert scene.log[-1] == "replace worker-2:1 engine_died"


async def test_a_router_with_a_fault_of_its_own_keeps_no_newcomer_from_the_others():
    scene = with_two_routers(Scene(worker_2=["engine_died"]))
    scene.routers[0].refuses = fault = DeploymentFailed("TlsFileError: security.tls.key cannot be read")

    async def replace_worker(address, reason):
        await scene.turns_until(lambda: scene.routers[0].refuses is None)  # it takes longer than to refuse
        for _ in range(5):
            await asyncio.sleep(0)
        scene.log.append("router-1 has it")

    scene.routers[1].replace_worker = replace_worker
    await scene.play()
    assert scene.log[:3] == [*AGAIN, "router-1 has it"]
    assert len(scene.starts) == 1
    assert any(said.startswith("router-0 cannot take in worker-2") and str(fault) in said for said in scene.said)
    assert scene.log.count("replace worker-2:1 engine_died") == 2, "the dispatcher, and router-0 once it is mended"


async def test_a_loaded_worker_is_kept_while_no_router_serves():
    scene, serves = Scene(), {"router": asyncio.Event()}
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
    ("index", "tries"),
    [(0, 0), (2, 0), (0, MAX_REGISTRATIONS + 5)],
    ids=["of_several", "dispatcher", "when_its_route_heals"],
)
async def test_what_a_router_did_not_reach_when_it_started_is_registered_to_it(index, tries):
    scene = with_two_routers(Scene())
    router = scene.routers[index]
    router.health.append("actor_died")
    router.missed, router.not_reached = ("worker-1:0",), tries
    await scene.play()
    assert scene.log[2:] == ["replace worker-1:0 None"]


async def test_routers_that_take_long_to_forget_a_worker_do_not_end_the_deployment():
    scene = Scene(worker_1=["draining", "drained"])
    refused, remove_worker = iter([DeploymentFailed("router did not finish remove_worker")]), scene.router.remove_worker

    async def late(worker_id):
        for error in refused:
            raise error
        await remove_worker(worker_id)

    scene.router.remove_worker = late
    await scene.play()
    assert scene.log == LEFT


async def test_a_router_that_reaches_no_worker_is_the_one_that_is_cut_off():
    scene = with_two_routers(Scene())
    scene.routers[0].partitioned = tuple(f"worker-{number}:0" for number in range(4))
    scene.routers[0].health.extend([""] * 3)
    await scene.play()
    assert any(said.startswith("router-0 is gone") for said in scene.said)
    assert scene.starts == []


# --- operations


@pytest.mark.parametrize(
    ("health", "then", "starts"),
    [
        pytest.param(["", "draining", "drained"], None, True, id="drains_and_counts_no_loss"),
        pytest.param(["", "draining", "drained"], "take_back_restart", False, id="is_taken_back_before_the_drain"),
        pytest.param(
            ["draining", "draining", "drained"], "take_back_restart", True, id="cannot_be_taken_back_any_more"
        ),
        pytest.param(["draining", "draining", "drained"], "let_leave", False, id="is_let_leave"),
    ],
)
async def test_a_worker_that_an_operator_wants_again(health, then, starts):
    scene = Scene(worker_1=health)
    back = scene.supervisor.restart_drained("worker-1")
    if then == "take_back_restart":
        assert await scene.supervisor.take_back_restart("worker-1") is not starts
    elif then == "let_leave":
        scene.supervisor.let_leave("worker-1")
    assert scene.supervisor.come_back == ({"worker-1"} if starts else set())
    await scene.play()
    again = ["end worker-1", "start worker-1", "replace worker-1:1 ordered"]
    assert [line for line in scene.log if "worker-1" in line] == (again if starts else LEFT)
    assert back.done() is starts
    assert any("drained, to be started again" in said for said in scene.said) is starts


async def test_a_restart_cannot_be_taken_back_while_the_worker_is_being_started_again():
    scene = Scene(worker_1=["drained"])
    back, worker, answers = scene.supervisor.restart_drained("worker-1"), scene.workers[1], []
    start = worker.start_again

    async def start_again():
        answers.append(await scene.supervisor.take_back_restart("worker-1"))
        return await start()

    worker.start_again = start_again
    await scene.play()
    assert (answers, back.done()) == ([False], True)


async def running(scene):
    task = asyncio.create_task(scene.play())
    await asyncio.sleep(0)
    return task


async def test_a_worker_that_is_added_is_registered_and_supervised():
    scene = Scene()
    playing = await running(scene)
    new = Worker("worker-9", scene.log, scene.clock, ["engine_died"])
    await scene.supervisor.add(new, "worker-9:0")
    await playing
    assert "replace worker-9:0 ordered" in scene.log
    assert "replace worker-9:1 engine_died" in scene.log


async def test_a_worker_that_one_router_refuses_is_forgotten_by_those_that_had_taken_it():
    scene = with_two_routers(Scene())
    playing = await running(scene)
    scene.routers[2].refuses = WorkerRefused("dispatcher could not replace_worker: PairingRefused: model")
    with pytest.raises(WorkerRefused):
        await scene.supervisor.add(Worker("worker-9", scene.log, scene.clock), "worker-9:0")
    assert "worker-9" not in scene.supervisor.workers
    await playing
    assert scene.log.count("remove worker-9") == 3


async def test_a_worker_that_waits_for_a_node_can_be_given_up_and_is_not_started_again():
    scene = Scene(worker_2=["actor_died"])
    scene.workers[2].places = [NO_NODE] * 1000
    playing = await running(scene)
    await scene.turns_until(lambda: any("waits for a node" in said for said in scene.said))
    assert scene.supervisor.lost == {"worker-2"}
    for _ in range(2):  # the second time does nothing
        await scene.supervisor.dismiss("worker-2")
    assert "worker-2" not in scene.supervisor.workers
    assert not scene.supervisor.lost
    scene.workers[2].places = []  # there is a node now
    await playing
    assert scene.log == ["end worker-2", "remove worker-2", "retire worker-2"]


async def test_a_worker_that_nobody_wants_any_more_while_it_is_registered_is_not_supervised():
    scene = Scene()
    playing = await running(scene)
    scene.router.not_reached = MAX_REGISTRATIONS
    adding = asyncio.create_task(scene.supervisor.add(Worker("worker-9", scene.log, scene.clock), "worker-9:0"))
    await asyncio.sleep(0)
    adding.cancel()
    await asyncio.wait((adding,))
    assert "worker-9" not in scene.supervisor.workers
    await playing
