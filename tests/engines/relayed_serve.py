"""`ridgeline serve` whose second router reaches the workers through relays: run as a module, with the same arguments.

SIGUSR1 drops all that this router and the second worker send each other, SIGUSR2 ends that. The relays are in the
driver's process; all others are as they always are.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from ridgeline.cluster.cli import main
from ridgeline.cluster.runtime.handles.routing import RouterHandle
from tests.support.cut_route import Route

RELAYED = "router-1"
_serve, _replace, _unreached = RouterHandle.serve, RouterHandle.replace_worker, RouterHandle.unreached
_relays: dict[str, str] = {}
"""The relay of each worker, by the worker's address."""


async def _relay_to(address: str) -> str:
    if address not in _relays:
        route = Route(address)
        _relays[address] = await route.start()
        loop = asyncio.get_running_loop()
        if len(_relays) <= 2:  # the second one takes the first one's place
            loop.add_signal_handler(signal.SIGUSR1, route.cut, "dropped")
            loop.add_signal_handler(signal.SIGUSR2, route.mend)
    return _relays[address]


async def serve(router: RouterHandle, addresses: list[str], *hardware: Any, **how: Any) -> str:
    """Have it connect to the relays instead, if it is that router."""
    if router.name == RELAYED:
        addresses = [await _relay_to(address) for address in addresses]
    return await _serve(router, addresses, *hardware, **how)


async def replace_worker(router: RouterHandle, address: str, *reason: Any) -> None:
    """The same for a worker that was started again."""
    await _replace(router, await _relay_to(address) if router.name == RELAYED else address, *reason)


async def unreached(router: RouterHandle, for_s: float) -> list[str]:
    """Return the workers' own addresses, by which the supervisor knows them."""
    workers = {relay: address for address, relay in _relays.items()}
    return [workers.get(address, address) for address in await _unreached(router, for_s)]


if __name__ == "__main__":
    RouterHandle.serve = serve  # type: ignore[method-assign, assignment]
    RouterHandle.replace_worker = replace_worker  # type: ignore[method-assign, assignment]
    RouterHandle.unreached = unreached  # type: ignore[method-assign]
    main()
