"""The state of a small cluster without connections, and a router whose requests hold their places until told."""

import math
from typing import get_args

from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.fleet.fleet import Fleet
from ridgeline.router.fleet.request_route import Demand
from ridgeline.router.fleet.roles import RoleTable
from ridgeline.router.fleet.worker import Outstanding
from ridgeline.router.placement.cluster_state import ClusterState
from ridgeline.router.placement.placement_events import Denied, Happened, Leaves, Wants
from ridgeline.router.placement.pool_queue import RouterRequests
from tests.support.clock import FakeClock
from tests.support.lone_worker import lone_worker
from tests.support.samples import LAYOUT, router_settings

WINDOW = 1000


def a_worker(worker_id="prefill-0", **changes):
    return lone_worker(worker_id, worker_id.split("-")[0], layout=LAYOUT, **changes)


class Bench:
    """Prompts go through pool `prefill`, and are decoded by `decode-0`, unless told otherwise."""

    def __init__(
        self,
        prefill=1,
        decode=1,
        recovery_timeout_s=60.0,
        chooser=None,
        window=WINDOW,
        max_num_seqs=256,
        paused=False,
        max_loras=0,
        **settings,
    ):
        self.clock, self.later = FakeClock(), []
        self.fleet = Fleet("test", roles=RoleTable("disaggregated", {"colocated": {}}))
        for pool, number in (("prefill", prefill), ("decode", decode)):
            for index in range(number):
                self.add(a_worker(f"{pool}-{index}", max_num_seqs=max_num_seqs, max_loras=max_loras))
        settings = router_settings(
            prefill_window_tokens=dict.fromkeys(get_args(Pool), window),
            recovery_timeout_s=recovery_timeout_s,
            **{"min_remote_prefill_tokens": 0} | settings,
        )
        self.state = ClusterState(
            self.fleet, settings, clock=self.clock, later=lambda _, look: self.later.append(look), paused=paused
        )
        self.queue = self.state.queues["prefill"]
        if chooser is not None:
            self.queue._choosers = [chooser, *self.queue._choosers]
        self.router = RouterRequests(self._told)
        self.started, self.places, self.denied, self._names = [], {}, {}, []

    def add(self, worker):
        self.fleet._workers[worker.worker_id] = worker
        return worker

    @property
    def prefills(self):
        return self.fleet.pool("prefill")

    def send(
        self,
        name,
        tokens,
        client="a",
        urgent=False,
        limit_s=math.inf,
        waited_s=0.0,
        avoided=(),
        probe=False,
        adapter="",
        router=None,
    ):
        demand = Demand(
            tokens,
            client=client,
            ttft_limit_s=limit_s,
            waited_s=waited_s,
            avoided=frozenset(avoided),
            urgent=urgent,
            probe=probe,
            adapter=adapter,
        )
        self._names.append(name)
        self.state.apply(router or self.router, Wants(len(self._names) - 1, demand))

    def _told(self, answer):
        name = self._names[answer.number]
        if isinstance(answer, Denied):
            self.denied[name] = answer
        else:
            self.started.append(name)
            self.places[name] = answer

    def first_token(self, name):
        self.state.apply(self.router, Happened(self._names.index(name), "prompt_done"))

    def tell(self, name, step):
        self.state.apply(self.router, Happened(self._names.index(name), step))

    def leave(self, name):
        self.state.apply(self.router, Leaves(self._names.index(name)))

    def finish(self, name):
        self.first_token(name)
        self.leave(name)

    def look_again(self):
        """Let the time come for which the state has asked."""
        looks, self.later[:] = self.later[:], []
        for look in looks:
            look()

    def worker_of(self, name):
        return self.places[name].prompt_worker[0]

    def outstanding(self):
        return [worker.outstanding.prompt_tokens for worker in self.prefills]

    def end(self):
        for name in self._names:
            self.leave(name)
        assert not any(queue.waiting for queue in self.state.queues.values())
        assert [worker.outstanding for worker in self.fleet.workers] == [Outstanding()] * len(self.fleet.workers)
        assert not self.state._places._held
        assert not self.router.by_number
