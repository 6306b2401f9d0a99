"""The LoRA adapters that all workers have, and how they come and go while requests are served.

A worker says what files it found, by their digest, so that workers with different files under one name never serve
together. Requests that run with an adapter keep it until they end, also if its name means another one by then.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from ridgeline.contracts.errors import AdapterRefused, WorkerLost
from ridgeline.contracts.tasks import Adapter
from ridgeline.router.fleet.fleet import Fleet
from ridgeline.router.fleet.worker import Worker

logger = logging.getLogger(__name__)


class Adapters(ABC):
    """The adapters of this router's deployment."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    @property
    def known(self) -> Mapping[str, Adapter]:
        """Those that requests can choose, by name."""
        return self._fleet.adapters

    def on_change(self, act: Callable[[], object]) -> None:
        """Act now, and whenever they have changed."""
        self._fleet.on_adapters = act
        act()

    @abstractmethod
    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Have all workers take an adapter in; `in_place`: also if its name is known. Raises AdapterRefused."""

    @abstractmethod
    async def unload(self, name: str) -> bool:
        """Have no more requests choose it; return False if there is none of this name. Raises AdapterRefused."""


class OwnAdapters(Adapters):
    """Those of a router that serves alone, and of the dispatcher."""

    def __init__(self, fleet: Fleet, served_names: Sequence[str], request_timeout_s: float) -> None:
        """`served_names` are the model's own; no request runs for longer than `request_timeout_s`."""
        super().__init__(fleet)
        self._served_names = served_names
        self._request_timeout_s = request_timeout_s
        self._one_at_a_time = asyncio.Lock()

    async def load_first(self, modules: Sequence[Mapping[str, str]], *, again: bool = False) -> None:
        """Load those of the configuration that the workers do not have yet. Raises AdapterRefused.

        `again`: the router has served before, and had better serve without one that can no longer be loaded.
        """
        for module in modules:
            try:
                if module["name"] not in self.known:
                    await self.load(module["name"], module["path"], in_place=False)
            except AdapterRefused as error:
                if not again:
                    raise
                logger.warning("%s", error)

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Have all workers take an adapter in; `in_place`: also if its name is known. Raises AdapterRefused."""
        async with self._one_at_a_time:
            former = self.known.get(name)
            if name in self._served_names:
                raise AdapterRefused(f"{name} is the name of the model itself: give the adapter another one")
            if former is not None and not in_place:
                raise AdapterRefused(f"the adapter {name} is loaded already: to replace it, set load_inplace to true")
            workers = [worker for worker in self._fleet.workers if worker.client.connected]
            adapter = await self._load_on(workers, name, path, former)
            self._fleet.offer_adapters({**self.known, name: adapter})
            logger.warning("adapter %s from %s on %d workers", adapter.key, path, len(workers))
            for worker in self._fleet.workers:
                if worker not in workers:  # it has come meanwhile, or is out of reach
                    self._fleet.when_connected(worker, self._fleet.give_adapters)
            if former is not None and former.key != adapter.key:
                await self._unload_on(self._fleet.workers, former, self._request_timeout_s)

    async def unload(self, name: str) -> bool:
        """Have no more requests choose it; return False if there is none of this name."""
        async with self._one_at_a_time:
            if (adapter := self.known.get(name)) is None:
                return False
            self._fleet.offer_adapters({each: one for each, one in self.known.items() if each != name})
            logger.warning("adapter %s is unloaded", adapter.key)
            await self._unload_on(self._fleet.workers, adapter, self._request_timeout_s)
            return True

    async def _load_on(self, workers: Sequence[Worker], name: str, path: str, former: Adapter | None) -> Adapter:
        """Return the adapter that all of these workers have now; if they do not, none of them keeps what it took in."""
        if not workers:
            raise AdapterRefused("no worker is connected: try again once GET /ready answers 200")
        asked = (worker.client.load_adapter(name, path) for worker in workers)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found: dict[str, Adapter] = {}
        refused: list[str] = []
        for worker, answer in zip(workers, answers, strict=True):
            if isinstance(answer, Adapter):
                found.setdefault(answer.key, answer)
                worker.adapters.load(answer.key)
            elif isinstance(answer, AdapterRefused | WorkerLost):
                refused.append(str(answer))
            else:
                raise answer
        if len(found) > 1:
            has = ", ".join(
                f"{worker.worker_id} {answer.digest[:12]}"
                for worker, answer in zip(workers, answers, strict=True)
                if isinstance(answer, Adapter)
            )
            refused.append(f"the files in {path} differ ({has}): copy the same ones to every node")
        if refused:
            for adapter in found.values():
                if former is None or adapter.key != former.key:
                    await self._unload_on(workers, adapter, self._request_timeout_s)  # some may run with it
            raise AdapterRefused(f"the adapter {name} is not loaded. {'. '.join(dict.fromkeys(refused))}")
        return next(iter(found.values()))

    async def _unload_on(self, workers: Sequence[Worker], adapter: Adapter, after_s: float) -> None:
        """Tell these workers; one that is out of reach is told when it is back, if the adapter is still not wanted."""

        async def tell(worker: Worker) -> None:
            if adapter not in self.known.values():
                worker.adapters.loaded.discard(adapter.key)
                await worker.client.unload_adapter(adapter, after_s)

        asked = [worker for worker in workers if adapter.key in worker.adapters.loaded]
        answers = await asyncio.gather(*map(tell, asked), return_exceptions=True)
        for worker, error in zip(asked, answers, strict=True):
            if isinstance(error, WorkerLost):
                self._fleet.when_connected(worker, tell)
            elif error is not None:
                raise error
