"""One client tries all it can to stop the service; another one, with a key of its own, is served as if it were alone.

The real router and vLLM's real app over real HTTP, real worker hosts over real gRPC; engines without a model, whose
steps take as long as real ones. Engines and clients are processes of their own. Undisturbed and disturbed rounds
alternate, so that what else the machine does falls on both, and what it did in one round alone does not decide.
"""

import asyncio
import gc
import json
import os
import sys
import warnings
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

from ridgeline.router.client_identity import hash_key
from tests.support.patience import eventually
from tests.support.samples import router_settings
from tests.support.served_router import make_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from ridgeline.router.server import Router

POLITE, HOSTILE, OPERATOR = "polite-key", "hostile-key", "operator-key"
REQUESTS = 24
LEAST_ROUNDS, MOST_ROUNDS = 2, 5
SLOTS = 512
DISTURBANCES = {"churn": ("on", 0), "flood": ("on", 512), "pages": ("pages",)}
"""What the hostile one is told. 512 sockets that never read hold all that one client may have, so that the rest is
refused; without them it is served, and left again. Pages need no key."""
SETTINGS = {
    "max_concurrent_requests": SLOTS,
    "max_client_share": 0.75,
    "send_timeout_s": 5.0,
    "recovery_timeout_s": 60.0,
    "request_timeout_s": 600.0,
    "api_key_hashes": frozenset(map(hash_key, (POLITE.encode(), HOSTILE.encode()))),
    "admin_key_hashes": frozenset({hash_key(OPERATOR.encode())}),
}
REPOSITORY = Path(__file__).parents[2]


@asynccontextmanager
async def process(module, *arguments):
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"tests.hostile.{module}", *map(str, arguments)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    try:
        yield child
    finally:
        child.kill()
        await child.wait()


@asynccontextmanager
async def client(kind, port, key):
    """A process that does what it is told."""
    async with process("clients", kind, port, key) as child:

        async def tell(*command):
            child.stdin.write(" ".join(map(str, command)).encode() + b"\n")
            return json.loads(await asyncio.wait_for(child.stdout.readline(), 120))

        yield tell


@asynccontextmanager
async def serving(model):
    """(router, its port), before engines in another process."""
    async with process("paced_engines") as engines:
        router = Router(router_settings(model_path=str(model), **SETTINGS))
        addresses = (await asyncio.wait_for(engines.stdout.readline(), 120)).decode().split()
        url = await router.serve(addresses, {})
        gc.collect()
        gc.freeze()  # as the router's actor does
        try:
            yield router, url.rpartition(":")[2]
        finally:
            gc.unfreeze()
            if not router.ended:
                await router.stop()


def p99(values):
    return sorted(values)[max(0, round(0.99 * len(values)) - 1)] if values else float("inf")


class Found:
    """What the polite one has measured, by how it was disturbed."""

    def __init__(self):
        self.p99_s = {name: {"ttft_s": [], "whole_s": []} for name in ("alone", *DISTURBANCES)}
        self.refused = Counter()

    def add(self, name, measured):
        self.refused.update(measured["refused"])
        for kind, rounds in self.p99_s[name].items():
            rounds.append(p99(measured[kind]))

    def ratios(self):
        """Of the p99 of an ordinary round, each kind of time under each disturbance against undisturbed."""
        return {
            f"{kind} in {name}": median(self.p99_s[name][kind]) / median(self.p99_s["alone"][kind])
            for name in DISTURBANCES
            for kind in ("ttft_s", "whole_s")
        }

    def __str__(self):
        return "; ".join(
            f"{name}: " + ", ".join(f"{kind} p99 {[round(one, 3) for one in p99s]}" for kind, p99s in kinds.items())
            for name, kinds in self.p99_s.items()
        )


async def test_a_hostile_client_costs_a_polite_one_at_most_as_much_again_and_nothing_is_refused_to_it(tmp_path):
    make_model(tmp_path)
    found, statuses, held = Found(), {name: Counter() for name in DISTURBANCES}, 0
    async with (
        serving(tmp_path) as (router, port),
        client("polite", port, POLITE) as polite,
        client("hostile", port, HOSTILE) as hostile,
    ):
        await polite("measure", 8)
        for number in range(MOST_ROUNDS):
            found.add("alone", await polite("measure", REQUESTS))
            for name, command in DISTURBANCES.items():
                await hostile(*command)
                found.add(name, await polite("measure", REQUESTS))
                held = max(held, router._client._admission.sequences)
                if name == "churn":
                    await hostile("answered")
                statuses[name].update(await hostile("off"))
                await eventually(lambda: not router._client.accepted, timeout_s=60)
            if number + 1 >= LEAST_ROUNDS and max(found.ratios().values()) <= 2:
                break
        sys.stdout.write(
            f"{found}; the loop was up to {router._lag.worst_s:.3f} s late; {held} held; "
            f"{ ({name: dict(counted) for name, counted in statuses.items()}) }\n"
        )
        assert not found.refused, "nothing is refused to the polite one"
        assert {ratio: value for ratio, value in found.ratios().items() if value > 2} == {}
        assert SLOTS // 4 < held <= 0.75 * SLOTS + 8, "the hostile one has its share and no more"
        assert not router.ended
        assert not any(worker.drains for worker in router.fleet.workers)
    flood, churn = statuses["flood"], statuses["churn"]
    assert statuses["pages"].keys() == {"/metrics: 200", "/ready: 200"}
    assert flood["prompt logprobs: 429"], "its sockets hold its share"
    assert {"drain: 401", "n 512: 400", "long id: 400", "millions of parts: 400", "n 300: 200", "n 300: 429"} <= {
        *churn
    }
    assert churn["prompt logprobs: 200"], "it is served, and disturbs nobody"
    never = ("drain: 2", "n 512: 2", "long id: 2")
    assert not {status for status in (*flood, *churn) if status.startswith(never)}
