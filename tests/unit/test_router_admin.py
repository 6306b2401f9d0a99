"""Which workers there are and that one leaves: the router's paths for operators, and `ridgeline drain` on top."""

import asyncio
import contextlib
import io

import httpx
import pytest
from fake_engine import LAYOUT, eventually
from fake_engine import make_task as a_task
from fastapi import FastAPI
from http_server import listening
from rich.console import Console
from small_fleet import a_fleet, hosts

from cluster.drain_command import drain
from loadtest.errors import ServerError
from router.admin import admin_routes


@contextlib.asynccontextmanager
async def admin(caller="127.0.0.1", callers_are_known=False, **layouts):
    """(HTTP client, hosts, fleet, app) of a router with these workers."""
    layouts = layouts or {"prefill": LAYOUT, "decode": LAYOUT}
    async with asyncio.timeout(60), hosts(**layouts) as started, a_fleet([host.address for host in started]) as fleet:
        app = FastAPI()
        app.include_router(admin_routes(fleet, callers_are_known=callers_are_known))
        transport = httpx.ASGITransport(app, client=(caller, 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
            yield http, started, fleet, app


async def test_the_list_has_every_worker_with_its_pool_and_state():
    async with admin() as (http, started, _, _):
        rows = (await http.get("/ridgeline/workers")).json()["workers"]
        assert [(row["worker"], row["pool"], row["state"]) for row in rows] == [
            ("prefill-0", "prefill", "ready"),
            ("decode-0", "decode", "ready"),
        ]
        assert rows[0]["incarnation"] == "i1"
        assert (rows[0]["tasks"], rows[0]["running"], rows[0]["leases"]) == (0, 0, 0)
        await started[0].stop()
        await asyncio.sleep(0.3)
        assert (await http.get("/ridgeline/workers")).json()["workers"][0]["state"] == "lost"


async def test_a_worker_that_is_told_to_drain_says_so_at_once_and_refuses_work():
    async with admin() as (http, started, fleet, _):
        answer = await http.post("/ridgeline/drain", json={"worker": "prefill-0", "timeout_s": 5})
        assert (answer.status_code, answer.json()["state"]) == (202, "draining")
        assert fleet.get("prefill-0").load().draining
        assert started[0].failure() == "draining"


@pytest.mark.parametrize("pool", ["decode", "colocated"])
async def test_the_last_worker_that_can_decode_leaves_only_by_force(pool):
    async with admin(**{pool: LAYOUT}) as (http, _, _, _):
        wish = {"worker": f"{pool}-0", "timeout_s": 0}
        refused = await http.post("/ridgeline/drain", json=wish)
        assert refused.status_code == 409
        assert f"{pool}-0 is the last {pool} worker" in refused.json()["detail"]
        assert (await http.post("/ridgeline/drain", json={**wish, "force": True})).status_code == 202


async def test_of_two_workers_told_to_leave_at_once_one_stays():
    async with admin(prefill=LAYOUT, decode=LAYOUT, decode_1=LAYOUT) as (http, _, fleet, _):
        wishes = [{"worker": name, "timeout_s": 0} for name in ("decode-0", "decode-1")]
        answers = await asyncio.gather(*(http.post("/ridgeline/drain", json=wish) for wish in wishes))
        assert [answer.status_code for answer in answers] == [202, 409]
        assert [worker.worker_id for worker in fleet.usable("decode")] == ["decode-1"]


async def test_an_unknown_worker_is_answered_with_the_names_there_are():
    async with admin() as (http, _, _, _):
        answer = await http.post("/ridgeline/drain", json={"worker": "decode-7"})
        assert answer.status_code == 404
        assert answer.json()["detail"] == "there is no worker decode-7; there are: decode-0, prefill-0"


@pytest.mark.parametrize("body", [{}, {"worker": 5}, {"worker": "prefill-0", "timeout_s": -1}, {"worker": "x", "y": 1}])
async def test_a_wish_that_makes_no_sense_is_refused(body):
    async with admin() as (http, started, _, _):
        assert (await http.post("/ridgeline/drain", json=body)).status_code == 422
        assert started[0].failure() == ""


@pytest.mark.parametrize("path", ["/ridgeline/workers", "/ridgeline/drain"])
async def test_without_keys_only_callers_on_this_machine_are_answered(path):
    async def status(http):
        method = "GET" if path.endswith("workers") else "POST"
        return (await http.request(method, path, json={"worker": "prefill-0"})).status_code

    async with admin(caller="10.0.0.7") as (http, started, _, _):
        assert await status(http) == 403
        assert started[0].failure() == ""
    async with admin(caller="10.0.0.7", callers_are_known=True) as (http, _, _, _):
        assert await status(http) in (200, 202)


async def test_without_keys_a_page_in_a_browser_of_this_machine_drains_nothing():
    async with admin() as (http, started, _, _):
        page = {"origin": "http://elsewhere.example"}
        assert (await http.post("/ridgeline/drain", json={"worker": "prefill-0"}, headers=page)).status_code == 403
        assert started[0].failure() == ""


# --- the command


async def test_the_command_tells_what_is_held_until_the_worker_is_gone():
    async with admin() as (_, started, fleet, app), listening(app) as url:
        started[0]._engine._stepping = "manual"
        leg = asyncio.ensure_future(anext(fleet.get("prefill-0").client.generate(a_task(leg="prefill"))))
        await eventually(lambda: started[0]._engine.running)
        console = Console(file=io.StringIO(), width=100)
        draining = asyncio.create_task(drain(f"{url}/v1", "prefill-0", 5, force=False, console=console))
        await eventually(lambda: "draining: 1 requests" in console.file.getvalue(), 20)
        started[0]._engine.step()
        await leg
        await eventually(lambda: started[0].failure() == "drained", 20)
        assert not draining.done()
        await fleet.remove("prefill-0")  # the supervisor's part
        await draining
        assert console.file.getvalue().splitlines()[-1] == "prefill-0 is gone"


async def test_the_commands_failures_are_sentences_that_name_what_to_do():
    console = Console(file=io.StringIO())
    with pytest.raises(ServerError, match="is the server running"):
        await drain("http://127.0.0.1:9", "decode-0", 1, force=False, console=console)
    app = FastAPI()
    async with listening(app) as url:
        with pytest.raises(ServerError, match="answers 404: is it a Ridgeline server"):
            await drain(url, "decode-0", 1, force=False, console=console)


async def test_the_command_sends_the_key_and_asks_for_one_when_it_is_missing(monkeypatch):
    app = FastAPI()

    @app.middleware("http")
    async def guard(request, go_on):
        return await go_on(request) if request.headers.get("authorization") == "Bearer k" else httpx_401()

    def httpx_401():
        from fastapi.responses import JSONResponse

        return JSONResponse({}, 401)

    @app.post("/ridgeline/drain")
    def accept():
        return {}

    @app.get("/ridgeline/workers")
    def none():
        return {"workers": []}

    console = Console(file=io.StringIO())
    async with listening(app) as url:
        monkeypatch.delenv("RIDGELINE_API_KEY", raising=False)
        with pytest.raises(ServerError, match="RIDGELINE_API_KEY"):
            await drain(url, "decode-0", 1, force=False, console=console)
        monkeypatch.setenv("RIDGELINE_API_KEY", "k")
        await drain(url, "decode-0", 1, force=False, console=console)
