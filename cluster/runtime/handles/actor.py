"""One Ray actor by name, whichever process fills it: Ray starts the process again when it ends."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.errors import ServingError
from ridgeline.cluster.model_store import DEFAULT_MODEL_NAME
from ridgeline.cluster.ray_nodes import ask_autoscaler
from ridgeline.cluster.runtime.actors import NodePlace
from ridgeline.cluster.runtime.plan import Plan
from ridgeline.cluster.runtime.processes import ProcessId, end_processes
from ridgeline.cluster.runtime.service_process.calls import ServiceError, ServiceGone
from ridgeline.cluster.runtime.services import NotServing
from ridgeline.contracts.errors import WorkerLost
from ridgeline.contracts.vocabulary import Health
from ridgeline.router.fleet.pairing import PairingRefused

LOOPBACK = "127.0.0.1"
"""The address everything listens on when Ray was started here, for this machine alone."""
ANSWER_WITHIN_S = 20.0
HEALTH_QUESTIONS = 2
"""How often an actor is asked for its health within that time before it counts as unreachable."""
CLEAR_WITHIN_S = 12.0
"""How long the actor may take to end what is left of its service; then the actor is ended too."""
REMOTE_END_WITHIN_S = 30.0
RETRY_S = 0.2
TELL_EVERY_S = 10.0
LISTEN_S = 0.5
"""The wait for an answer is made of parts of this length, each of which counts as that long however late it ends: a
pause of any length costs one part, and a loop that is slow costs patience only."""
T = TypeVar("T")


class DeploymentFailed(ServingError):
    """Something that was running or starting is gone; the message names it."""


class NoPlace(DeploymentFailed):
    """Ray has no node for the actor now."""


class NotReached(DeploymentFailed):
    """The router could not connect to a worker in time."""


class WorkerRefused(DeploymentFailed):
    """A worker cannot work together with the others, whichever router has it."""


class ActorGone(DeploymentFailed):
    """The actor's process ended during the call, or is a new one that does not serve yet."""


_KINDS: dict[type[BaseException], type[DeploymentFailed]] = {
    NotServing: ActorGone,
    ServiceGone: ActorGone,
    WorkerLost: NotReached,
    PairingRefused: WorkerRefused,
}
"""What each exception of an actor becomes on this side."""


LACKS = re.compile(
    r"No module named '[^']+'|cannot import name '[^']+'|an't get attribute '[^']+'|has no attribute '[^']+'"
)
"""What Python says on a machine without this Ridgeline."""


def why_not_started(error: RayError) -> str:
    """Return why Ray could not run our code; of a machine that lacks it, or has another version, with the fix."""
    text = str(error).strip()
    if not (lacks := LACKS.findall(text)):
        return text.splitlines()[0]
    host = re.search(r"\bip=([\w.:]+)", text)
    return (
        f"{lacks[-1]} in the Python that runs Ray{f' on {host[1]}' if host else ' there'}: run `make setup` of this "
        "Ridgeline on that machine, and start Ray from its .venv"
    )


async def answered(asked: Awaitable[T], within_s: float) -> T:
    """Return the answer. Raises TimeoutError if there is none in time, and then no longer waits for it.

    Only time counts in which this process ran and could have heard it. A driver that stood still (SIGSTOP,
    `docker pause`, swap, one long call) would otherwise find all its questions overdue at once when it goes on, before
    it reads the answers that are already there.
    """
    answer = asyncio.ensure_future(asked)
    try:
        left_s = within_s
        while left_s > 0.0:
            part_s = min(left_s, LISTEN_S)
            await asyncio.wait((answer,), timeout=part_s)
            if answer.done():
                return answer.result()
            left_s -= part_s
        raise TimeoutError
    finally:
        answer.cancel()


class ActorHandle:
    """What the handles of workers, routers and the dispatcher have in common."""

    def __init__(self, name: str, actor: Any, config: RidgelineConfig) -> None:
        self.name = name
        self._placement_timeout_s = config.ray.patience_s
        self._start_timeout_s = config.supervision.start_timeout_s
        self._actor = actor
        self._place: NodePlace | None = None
        self._cleared: NodePlace | None = None
        """Where the next service begins, if the actor has outlived the last one."""
        self._service: ProcessId | None = None
        """The process that runs the actor's service, and must not outlive it."""
        self._children: tuple[ProcessId, ...] = ()
        """Processes below the service's."""
        self._files: tuple[str, ...] = ()
        """Files of their semaphores, to be removed with them."""
        self.tell: Callable[[str], None] | None = None
        """Is told how launches of nodes go on, while the actor has no place on one; None: somebody else tells it."""

    async def find_place(self) -> NodePlace:
        """Wait until Ray has placed the actor, in a process not seen before unless it was cleared, and return where.

        Raises NoPlace after `ray.placement_timeout_s`, and DeploymentFailed if there will be none.
        """
        if self._cleared is not None:
            self._place, self._cleared = self._cleared, None
            return self._place
        telling = asyncio.create_task(self._tell_launches(self.tell)) if self.tell else None
        try:
            self._place = await answered(self._other_place(self._place), self._placement_timeout_s)
        except TimeoutError as error:
            limit = f"{self._placement_timeout_s:.0f} s (ray.placement_timeout_s)"
            raise NoPlace(f"Ray found no place for {self.name} within {limit}") from error
        except RayError as error:
            raise DeploymentFailed(f"Ray could not start {self.name}: {why_not_started(error)}") from error
        finally:
            if telling is not None:
                telling.cancel()
        return self._place

    async def _tell_launches(self, tell: Callable[[str], None]) -> None:
        told = ""
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            if (says := str(await asyncio.to_thread(ask_autoscaler))) and says != told:
                tell(f"{self.name} waits for a node; {says}")
            told = says

    async def _other_place(self, former: NodePlace | None) -> NodePlace:
        while True:
            with suppress(ActorUnavailableError):
                place: NodePlace = await self._actor.place.remote()
                if former is None or (place.node_id, place.process.pid) != (former.node_id, former.process.pid):
                    return place
            await asyncio.sleep(RETRY_S)

    async def begin(self) -> None:
        """Have the actor start the process of its service. Raises DeploymentFailed or ActorGone."""
        self._service = await self._ask("begin")

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call the actor's service; an error there becomes one sentence here. Raises DeploymentFailed or ActorGone.

        Without a `timeout_s` of its own it may take as long as a start.
        """
        return await self._ask("call", method, *args, timeout_s=timeout_s)

    async def model_path(self, plan: Plan) -> str:
        """Return what to load as the model on the actor's node. Raises DeploymentFailed."""
        if plan.config.ray.address is None:
            return str(plan.model_path)
        default = plan.config.model.path == DEFAULT_MODEL_NAME
        wanted = plan.model_path.absolute() if plan.model_path.is_dir() else plan.model_path
        return str(await self.call("prepare_model", DEFAULT_MODEL_NAME if default else str(wanted)))

    async def call_apart(self, method: str, *args: Any) -> Any:
        """The same in a process of its own, which then ends."""
        return await self._ask("call_apart", method, *args)

    async def _ask(self, what: str, *args: Any, timeout_s: float | None = None) -> Any:
        method = args[0] if args else what
        limit_s = self._start_timeout_s if timeout_s is None else timeout_s
        try:
            return await answered(getattr(self._actor, what).remote(*args), limit_s)
        except TimeoutError as error:
            setting = " (supervision.start_timeout_s)" if timeout_s is None else ""
            raise DeploymentFailed(f"{self.name} did not finish {method} within {limit_s:.0f} s{setting}") from error
        except RayActorError as error:
            first_line = str(error).splitlines()[0]
            raise ActorGone(f"{self.name} ended while it ran {method}: {first_line}") from error
        except RayError as error:
            cause = getattr(error, "cause", None) or error
            message = str(cause) if isinstance(cause, ServiceError) else f"{type(cause).__name__}: {cause}"
            raise _KINDS.get(type(cause), DeploymentFailed)(f"{self.name} could not {method}: {message}") from error

    async def failure(self) -> Health:
        """Ask whether the actor's process must be replaced, and why.

        While Ray starts another process in place of a dead one, calls fail; the new process then reports it.
        """
        for _ in range(HEALTH_QUESTIONS):
            try:
                return await answered(self._health(), ANSWER_WITHIN_S / HEALTH_QUESTIONS)
            except TimeoutError:
                pass
            except RayError:
                return "actor_died"
        return "unreachable"

    async def _health(self) -> Health:
        while True:
            with suppress(ActorUnavailableError):
                health: Health = await self._actor.failure.remote()
                return health
            await asyncio.sleep(RETRY_S)

    async def end(self) -> None:
        """SIGKILL what is left of the actor's service, and the actor as well if it does not do that itself in time."""
        if self._place is not None and not await self._clear(self._place):
            await self._end_processes(self._place)

    async def _clear(self, place: NodePlace) -> bool:
        """Have the actor end what is left: False if it cannot be asked, or has been started on another node since."""
        try:
            cleared = self._actor.clear.remote(self._of_the_service(), self._files)
            here: NodePlace = await answered(cleared, CLEAR_WITHIN_S)
        except (RayError, TimeoutError):
            return False
        if here.node_id != place.node_id:
            return False
        self._cleared = here
        return True

    def _of_the_service(self) -> list[ProcessId]:
        return [*self._children, *([self._service] if self._service else [])]

    async def _end_processes(self, place: NodePlace) -> None:
        """SIGKILL the actor's process and those below it, on whichever node, and wait until they are gone."""
        processes = [*self._of_the_service(), place.process]
        if place.node_id == ray.get_runtime_context().get_node_id():
            await asyncio.to_thread(end_processes, processes, self._files)
            return
        there = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
        try:
            end_there = ray.remote(end_processes).options(num_cpus=0, scheduling_strategy=there)
            await answered(end_there.remote(processes, self._files), REMOTE_END_WITHIN_S)
        except (RayError, TimeoutError):
            # The node is gone, or as good as: Ray then starts the actor on another one.
            ray.kill(self._actor, no_restart=False)

    async def stop(self) -> None:
        """Ask the actor to stop; it may be gone already."""
        with suppress(RayError):
            await self._actor.call.remote("stop")

    async def kill(self) -> None:
        """End the actor now, and have Ray start no other."""
        try:
            ray.kill(self._actor, no_restart=True)
        finally:
            if self._place is not None:
                await self._end_processes(self._place)
