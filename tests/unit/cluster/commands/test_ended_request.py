"""`ridgeline trace ID`: the stages of a request as bars, and which router is asked."""

import io

import msgspec
import pytest
from fastapi import FastAPI
from rich.console import Console
from starlette.responses import Response

from ridgeline.cluster.commands.ended_request import show
from ridgeline.loadtest.errors import ServerError
from ridgeline.router.observe.ended_requests import EndedRequests
from tests.support.clock import FakeClock
from tests.support.ended_requests import ended, handed_over
from tests.support.http_server import listening


def a_server(*timelines, routers=1, answering=1):
    """A server with so many routers, of which the one that has the requests answers every so many connections."""
    app, kept, asked = FastAPI(), EndedRequests(FakeClock(), routers=routers), []
    for timeline in timelines:
        kept.add(timeline, "finished")

    @app.get("/ridgeline/requests")
    async def requests(id: str, last: int) -> Response:
        asked.append(id)
        return Response(msgspec.json.encode(kept.answer(last, id if len(asked) % answering == 0 else "another")))

    return app, asked


async def shown(wanted, *timelines, **server):
    app, asked = a_server(*timelines, **server)
    console = Console(file=io.StringIO(), width=140)
    async with listening(app) as url:
        await show(url, wanted, admin_key_file=None, console=console)
    return console.file.getvalue().splitlines(), asked


async def test_the_stages_of_a_request_are_drawn_on_one_clock_and_add_up_to_its_latency():
    lines, _ = await shown("cmpl-1", handed_over())
    assert [line.rstrip() for line in lines] == [
        "cmpl-1: 512 tokens in, 3 out, finished 0.0 s ago, disaggregated",
        "TTFT 1.25 s, TPOT 1.06 s",
        "stage         where               start ms  took ms",
        "preprocess    router                   0.0    125.0  █",
        "queue         router                 125.0    250.0   ███",
        "dispatch      worker-0 (prefill)     375.0    125.0      ██",
        "engine_queue  worker-0 (prefill)     500.0    250.0        ███",
        "prefill       worker-0 (prefill)     750.0    500.0           ██████",
        "dispatch      worker-1 (decode)    1,250.0    125.0                 █",
        "handoff_wait  worker-1 (decode)    1,375.0    125.0                  ██",
        "wire          worker-1 (decode)    1,500.0    250.0                    ███",
        "decode_queue  worker-1 (decode)    1,750.0    375.0                       ████",
        "decode        worker-1 (decode)    2,125.0  1,250.0                           ███████████████",
        "latency                                     3,375.0",
        "hand-off worker-0 -> worker-1: ok, 4,096 bytes by shm, first byte after 125 ms, then 250 ms",
    ]


async def test_limits_and_all_sequences_of_a_request_are_shown_oldest_first_without_control_characters():
    sequences = (
        ended(None, 0.5, request_id=f"a\x1b[{n}]", http_request_id="h", error="WorkerLost" * n) for n in range(2)
    )
    lines, _ = await shown("h", *sequences)
    assert " (WorkerLost) 0.0 s ago" in lines[-5]
    assert [line.split(":")[0] for line in lines if "tokens in" in line] == ["a?[0]", "a?[1]"]
    assert lines[1] == "TTFT 500 ms (limit 2.00 s)"


async def test_of_several_routers_the_one_that_has_the_request_is_found_by_new_connections():
    lines, asked = await shown("cmpl-1", handed_over(), routers=2, answering=3)
    assert (lines[0].split(":")[0], len(asked)) == ("cmpl-1", 3)


@pytest.mark.parametrize(
    ("routers", "times", "said"), [(1, 1, "latest 1000 "), (2, 16, "1000 for each of its routers")]
)
async def test_an_unknown_id_is_an_error_that_says_how_many_are_kept(routers, times, said):
    app, asked = a_server(ended(), routers=routers)
    async with listening(app) as url:
        with pytest.raises(ServerError, match=r"'a/b\?'.*has 1 now") as error:
            await show(url, "a/b\x1b", admin_key_file=None, console=Console(file=io.StringIO()))
    assert said in str(error.value)
    assert asked == ["a/b\x1b"] * times
