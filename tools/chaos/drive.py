"""Runs clients: a closed loop of users who think between requests, and arrivals that wait for nobody."""

from __future__ import annotations

import asyncio
import random
from itertools import count

import httpx

from tools.chaos.records import Record, ask
from tools.chaos.wishes import Mix

USERS, THINK_S, ARRIVALS_PER_S = 8, 2.0, 0.1


class Load:
    """The requests sent so far and their records; requests are numbered in the order they are sent."""

    def __init__(self, http: httpx.AsyncClient, mix: Mix, seed: int) -> None:
        self._http = http
        self._mix = mix
        self._seed = seed
        self._numbers = count()
        self._stopped = asyncio.Event()
        self.running = 0
        self.records: list[Record] = []

    def stop(self) -> None:
        """Send nothing more; running requests may end."""
        self._stopped.set()

    async def run(self) -> None:
        """Send until stopped, and return when all answers have ended."""
        async with asyncio.TaskGroup() as group:
            for user in range(USERS):
                group.create_task(self._user(random.Random(f"{self._seed}/user/{user}")))
            rng = random.Random(f"{self._seed}/arrivals")
            while not await is_set_within(self._stopped, rng.expovariate(ARRIVALS_PER_S)):
                group.create_task(self._send())

    async def _user(self, rng: random.Random) -> None:
        while not await is_set_within(self._stopped, rng.expovariate(1 / THINK_S)):
            await self._send()

    async def _send(self) -> None:
        self.running += 1
        try:
            self.records.append(await ask(self._http, self._mix.wish(next(self._numbers))))
        finally:
            self.running -= 1


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event; return whether it came in time."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
