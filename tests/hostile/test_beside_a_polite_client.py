"""One client tries all it can to stop the service; another one, with a key of its own, is served as if it were alone.

The real router and vLLM's real app over real HTTP, real worker hosts over real gRPC; engines without a model, whose
steps take as long as real ones. Both clients are processes of their own. Undisturbed and disturbed rounds alternate, so
that what else the machine does falls on both.
"""

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fake_engine import eventually
from paced_engine import PacedEngine
from served_router import make_model, serving

from router.client_identity import hash_key

POLITE, HOSTILE, OPERATOR = "polite-key", "hostile-key", "operator-key"
REQUESTS = 40
LEAST_ROUNDS, MOST_ROUNDS = 2, 3
SLOTS = 512


class Client:
    """A process that does what it is told."""

    def __init__(self, process):
        self._process = process

    async def __call__(self, *command):
        self._process.stdin.write(" ".join(map(str, command)).encode() + b"\n")
        line = await asyncio.wait_for(self._process.stdout.readline(), 60)
        return json.loads(line)


@asynccontextmanager
async def client(kind, port, key):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, Path(__file__).with_name("clients.py"), kind, str(port), key),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Client(process)
    finally:
        process.kill()
        await process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return directory


def p99(values):
    return sorted(values)[max(0, round(0.99 * len(values)) - 1)]


async def test_a_hostile_client_costs_a_polite_one_at_most_as_much_again_and_nothing_is_refused_to_it(model):
    engines = (
        PacedEngine("prefill", step_s=0.03, max_num_seqs=128, prompt_tokens_per_s=20_000),
        PacedEngine("decode", step_s=0.1, max_num_seqs=64),
    )
    settings = {
        "max_outstanding_requests": SLOTS,
        "max_client_share": 0.75,
        "write_deadline_s": 5.0,
        "recovery_timeout_s": 60.0,
        "request_deadline_s": 600.0,
        "api_key_hashes": frozenset(map(hash_key, (POLITE.encode(), HOSTILE.encode()))),
        "admin_key_hashes": frozenset({hash_key(OPERATOR.encode())}),
    }
    async with serving(model, engines, **settings) as (http, router, *_):
        pacing = [asyncio.create_task(engine.pace()) for engine in engines]
        port = http.base_url.port
        async with client("polite", port, POLITE) as polite, client("hostile", port, HOSTILE) as hostile:
            await polite("measure", 4)
            undisturbed, disturbed, refused, statuses, held = [], [], {}, {}, 0
            for number in range(MOST_ROUNDS):
                alone = await polite("measure", REQUESTS)
                await hostile("on")
                beside = await polite("measure", REQUESTS)
                held = max(held, router._client._admission.sequences)
                statuses |= await hostile("off")
                await eventually(lambda: not router._client.accepted, timeout_s=30)
                undisturbed += alone["ttfts_s"]
                disturbed += beside["ttfts_s"]
                refused |= alone["refused"] | beside["refused"]
                if number + 1 >= LEAST_ROUNDS and p99(disturbed) <= 2 * p99(undisturbed):
                    break
        for task in pacing:
            task.cancel()
        sys.stdout.write(
            f"TTFT p99 {p99(undisturbed):.3f} s alone, {p99(disturbed):.3f} s beside; the loop was up to "
            f"{router._lag.worst_s:.3f} s late; {held} held; {statuses}\n"
        )
        assert refused == {}, "nothing is refused to the polite one"
        assert len(disturbed) == (number + 1) * REQUESTS
        assert p99(disturbed) <= 2 * p99(undisturbed)
        assert SLOTS // 4 < held <= 0.75 * SLOTS + 1, "the hostile one has its share and no more"
        assert not router.ended
        assert {"drain: 401", "n 512: 400", "long id: 400", "millions of parts: 400"} <= set(statuses)
        assert not {status for status in statuses if status.startswith(("drain: 2", "n 512: 2", "long id: 2"))}
        assert any(status == "prompt logprobs: 200" for status in statuses), "it is served, and disturbs nobody"
        assert not any(worker.load().draining for worker in router._fleet.workers)
