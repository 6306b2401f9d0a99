"""Which workers there are and that one leaves: the router's paths for operators, and `ridgeline drain` on top."""

import asyncio
import contextlib
import io
import json
import pickle
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from rich.console import Console
from starlette.responses import Response

from ridgeline.cluster.commands.decisions import decisions
from ridgeline.cluster.commands.operators import (
    ANSWER_WITHIN_S,
    MODE_WITHIN_S,
    ask,
    cancel,
    drain,
    mode,
    operator_client,
    record,
    restart,
    scale,
)
from ridgeline.cluster.commands.top import watch
from ridgeline.cluster.config.api_keys import ApiKeyError, key_hashes
from ridgeline.cluster.config.loader import explain, load_config
from ridgeline.loadtest.errors import ServerError
from ridgeline.router.client_identity import hash_key
from ridgeline.router.decisions import CHANGE_WITHIN_S
from ridgeline.router.dispatch.modes import OwnModes
from ridgeline.router.fleet.fleet import SPLIT_FOR_EVER
from ridgeline.router.fleet.roles import RoleTable
from ridgeline.router.front.admin import admin_routes
from ridgeline.router.front.http.context import WithContext
from ridgeline.router.front.http.errors import HttpRefusal
from ridgeline.router.front.middleware.admin_access import AdminAccess
from ridgeline.router.front.middleware.auth import Access, KeyGuard
from ridgeline.router.front.operations import Operations, Progress, new_operation
from ridgeline.router.observe.ended_requests import KEPT, EndedRequests, RequestsAnswer
from ridgeline.router.scheduler.recorded_events import Stopped, line_of
from tests.support.ended_requests import ended
from tests.support.fake_engine import make_task as a_task
from tests.support.http_server import listening
from tests.support.patience import PATIENCE_S, eventually
from tests.support.samples import LAYOUT, router_settings
from tests.support.small_fleet import a_fleet, hosts
from tests.support.symptoms import is_quoted
from tests.support.task_deltas import task_deltas

KEY = "an-admin-key"
LOCAL = AdminAccess()
KEYED = AdminAccess(frozenset({hash_key(KEY.encode())}))
BEARER = {"authorization": f"Bearer {KEY}"}


RECORDING = []


async def recorder(wanted):
    """A recording of one line, and nothing after it."""
    RECORDING.append(wanted)
    try:
        yield line_of(Stopped(1.0, f"{wanted.seconds:.0f} s"))
        await asyncio.Event().wait()
    finally:
        RECORDING.remove(wanted)


@contextlib.asynccontextmanager
async def admin(caller="127.0.0.1", access=LOCAL, roles=SPLIT_FOR_EVER, **layouts):
    """(HTTP client, hosts, fleet, app) of a router with these workers."""
    layouts = layouts or {"prefill": LAYOUT, "decode": LAYOUT}
    async with (
        asyncio.timeout(PATIENCE_S),
        hosts(**layouts) as started,
        a_fleet([host.address for host in started], roles) as fleet,
    ):
        app = FastAPI()
        book, ended_ones = Operations(), EndedRequests()
        stopping, live = asyncio.Event(), SimpleNamespace(mode_is_for=(None, ""))
        app.include_router(admin_routes(fleet, OwnModes(fleet, lambda: 0), book, ended_ones, live, recorder, stopping))
        app = WithContext(KeyGuard(app, Access(admin=access)))
        app.book, app.ended, app.stopping, app.live = book, ended_ones, stopping, live
        transport = httpx.ASGITransport(app, client=(caller, 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield http, started, fleet, app


async def test_the_list_has_every_worker_with_its_pool_and_state():
    async with admin() as (http, started, fleet, _):
        rows = (await http.get("/ridgeline/workers")).json()["workers"]
        assert [(row["worker"], row["pool"], row["state"]) for row in rows] == [
            ("prefill-0", "prefill", "ready"),
            ("decode-0", "decode", "ready"),
        ]
        assert rows[0]["incarnation"] == started[0]._engine.config.incarnation
        assert (rows[0]["tasks"], rows[0]["running"], rows[0]["leases"]) == (0, 0, 0)
        await started[0].stop()
        await eventually(lambda: not fleet.get("prefill-0").client.connected)
        assert (await http.get("/ridgeline/workers")).json()["workers"][0]["state"] == "lost"


def a_console():
    return Console(file=io.StringIO(), width=200)


async def test_recordings_are_written_until_their_reader_leaves_or_the_server_stops_four_at_most(tmp_path):
    async with admin() as (http, _, _, app), listening(app) as url:

        def recording(name):
            return record(tmp_path / name, url, 60.0, 1 << 20, admin_key_file=None, console=consoles[name])

        names = [f"{number}.jsonl" for number in range(4)]
        consoles = {name: a_console() for name in (*names, "more.jsonl")}
        writing = {name: asyncio.create_task(recording(name)) for name in names}
        files = [tmp_path / name for name in names]
        await eventually(lambda: all(file.exists() and file.stat().st_size for file in files))
        with pytest.raises(ServerError, match="409"):
            await recording("more.jsonl")
        assert not (tmp_path / "more.jsonl").exists()
        for impossible in ({"seconds": 0}, {"seconds": "ever"}, {"most_bytes": 0}, {"seconds": 1e9}):
            assert (await http.get("/ridgeline/record", params=impossible)).status_code == 422
        writing.pop("3.jsonl").cancel()
        await eventually(lambda: len(RECORDING) == 3)
        app.stopping.set()
        await asyncio.gather(*writing.values())
        reasons = [json.loads(line)["reason"] for line in files[0].read_text().splitlines()]
        assert reasons == ["60 s", "the server stops"]
        assert consoles["0.jsonl"].file.getvalue().endswith(f"ridgeline whatif {files[0]}\n")
        with pytest.raises(ServerError, match="exists already"):
            await recording("0.jsonl")


@pytest.mark.parametrize(
    ("path", "none"),
    [
        ("/ridgeline/decisions", {"mode": "disaggregated", "decisions": []}),
        ("/ridgeline/requests", {"routers": 1, "kept": 0, "most": KEPT, "requests": []}),
    ],
)
async def test_an_impossible_number_of_decisions_or_requests_is_refused(path, none):
    async with admin() as (http, _, _, _):
        for last in ("0", "-1", str(KEPT + 1), "all", "1e3", ""):
            assert (await http.get(path, params={"last": last})).status_code == 422, last
        assert (await http.get(path)).json() == none


async def test_the_latest_requests_or_those_with_an_id_are_told():
    async with admin() as (http, _, _, app):
        for number in range(3):
            app.ended.add(ended(request_id=f"cmpl-{number}"), "finished")

        async def ids(**params):
            got = await http.get("/ridgeline/requests", params=params)
            answer = msgspec.json.decode(got.content, type=RequestsAnswer)
            assert answer.kept == 3
            return [one.request_id for one in answer.requests]

        assert await ids(last=2) == ["cmpl-2", "cmpl-1"]
        assert await ids(id="cmpl-0") == ["cmpl-0"]
        assert await ids(id="cmpl-3") == []


ALL = {"prefill": LAYOUT, "decode": LAYOUT}


async def told(http, wish, **headers):
    """(status, what was told) of a wish to drain."""
    answer = await http.post("/ridgeline/drain", json=wish, headers=headers)
    return answer.status_code, answer.json()


async def test_a_worker_that_is_told_to_drain_says_so_at_once_and_refuses_work():
    async with admin(**ALL, prefill_1=LAYOUT) as (http, started, fleet, _):
        status, row = await told(http, {"worker": "prefill-0", "timeout_s": 5})
        assert (status, row["state"]) == (202, "draining")
        assert fleet.get("prefill-0").drains
        assert started[0].failure() == "draining"


@pytest.mark.parametrize("pool", ["decode", "colocated", "prefill"])
async def test_the_last_worker_of_a_pool_leaves_only_by_force_and_force_takes_an_admin_key(pool):
    wish = {"worker": f"{pool}-0", "timeout_s": 0}
    async with admin(access=KEYED, **{pool: LAYOUT}) as (http, _, _, _):
        status, refused = await told(http, wish, **BEARER)
        assert (status, f"{pool}-0" in refused["detail"], "--force" in refused["detail"]) == (409, True, True)
        assert (await told(http, wish | {"force": True}, **BEARER))[0] == 202
    async with admin(**{pool: LAYOUT}) as (http, started, _, _):
        status, refused = await told(http, wish | {"force": True})
        assert (status, "security.admin_keys_file" in refused["detail"]) == (403, True)
        assert started[0].failure() == ""


async def test_a_worker_is_the_last_if_the_others_of_its_pool_cannot_be_given_work():
    async with admin(**ALL, decode_1=LAYOUT) as (http, started, fleet, _):
        started[2]._engine.failed = True
        await fleet.refresh()
        assert (await told(http, {"worker": "decode-0", "timeout_s": 0}))[0] == 409
        assert started[1].failure() == ""


async def test_the_last_worker_may_be_hurried_once_it_leaves():
    async with admin(access=KEYED, decode=LAYOUT) as (http, started, _, _):
        started[0].drain(60)  # on SIGTERM
        assert (await http.get("/ridgeline/workers", headers=BEARER)).json()["workers"][0]["state"] == "draining"
        assert (await told(http, {"worker": "decode-0", "timeout_s": 0}, **BEARER))[0] == 202


async def test_of_two_workers_told_to_leave_at_once_one_stays():
    async with admin(**ALL, decode_1=LAYOUT) as (http, _, fleet, _):
        wishes = [{"worker": name, "timeout_s": 0} for name in ("decode-0", "decode-1")]
        answers = await asyncio.gather(*(told(http, wish) for wish in wishes))
        assert [status for status, _ in answers] == [202, 409]
        assert [worker.worker_id for worker in fleet.usable("decode")] == ["decode-1"]


async def test_a_wish_that_makes_no_sense_is_refused_and_an_unknown_worker_answered_with_those_there_are():
    async with admin() as (http, started, _, _):
        for body in ({}, {"worker": 5}, {"worker": "prefill-0", "timeout_s": -1}, {"worker": "x", "y": 1}):
            assert (await told(http, body))[0] == 422, body
        status, refused = await told(http, {"worker": "decode-7"})
        assert (status, refused["detail"].partition(": ")[2]) == (404, "decode-0 (decode), prefill-0 (prefill)")
        assert started[0].failure() == ""


# --- operations


async def driver(book, state="running", sentences=("begins",)):
    """Answer an operation as the driver does."""
    operation = (await book.take(PATIENCE_S)).operation
    book.report(Progress(operation, state, sentences))
    return operation


async def test_one_operation_is_under_way_and_tells_how_far_it_is():
    async with admin() as (http, _, _, app):
        assert (await http.get("/ridgeline/operation")).json() == {}
        taken = asyncio.create_task(driver(app.book))
        row = (await http.post("/ridgeline/scale", json={"workers": {"decode": 2}})).json()
        operation = await taken
        assert row == {
            "operation": operation.operation_id,
            "kind": "scale",
            "workers": {"decode": 2},
            "mode": "disaggregated",
            "state": "running",
            "sentences": ["begins"],
        }
        refused = await http.post("/ridgeline/restart", json={})
        assert refused.status_code == 409
        assert operation.operation_id in refused.json()["detail"]
        app.book.report(Progress(operation, "done", ("begins", "done")))
        assert (await http.get("/ridgeline/operation")).json() == row | {
            "state": "done",
            "sentences": ["begins", "done"],
        }


async def test_an_operation_that_the_driver_refuses_or_does_not_take_up_is_told(monkeypatch):
    async with admin() as (http, _, _, app):
        refusing = asyncio.create_task(driver(app.book, "refused", ("operation x is under way",)))
        refused = await http.post("/ridgeline/restart", json={})
        assert (refused.status_code, refused.json()["detail"]) == (409, "operation x is under way")
        await refusing
        monkeypatch.setattr(Operations.begin, "__defaults__", (0.01,))
        nobody = await http.post("/ridgeline/restart", json={})
        assert nobody.status_code == 503


async def test_an_operation_is_cancelled_unless_none_is_under_way():
    async with admin() as (http, _, _, app):
        assert (await http.delete("/ridgeline/operation")).status_code == 409
        operation = new_operation("restart", 1.0, {})
        app.book.report(Progress(operation))
        assert (await http.delete("/ridgeline/operation")).status_code == 202
        for _ in range(2):  # an answer may get lost
            assert (await app.book.take(0.0)).cancels == operation.operation_id
        app.book.report(Progress(operation, "cancelled"))
        assert (await http.delete("/ridgeline/operation")).status_code == 409


@pytest.mark.parametrize("kind", ["scale", "restart"])
async def test_the_mode_does_not_change_while_pools_are_scaled(kind):
    roles = RoleTable("disaggregated", {"disaggregated": {}, "colocated": {}})
    async with admin(roles=roles) as (http, _, fleet, app):
        operation = new_operation(kind, 1.0, {"decode": 2} if kind == "scale" else {}, mode="disaggregated")
        app.book.report(Progress(operation))
        answer = await http.post("/ridgeline/mode", json={"mode": "colocated"})
        if kind == "restart":  # is about all workers, in any mode
            assert answer.status_code == 200
            return
        assert answer.status_code == 409
        assert f"{operation.operation_id} (scale decode=2)" in answer.json()["detail"]
        assert fleet.mode == "disaggregated"
        assert (await http.post("/ridgeline/mode", json={"mode": "disaggregated"})).status_code == 200  # no change
        app.book.report(Progress(operation, "done"))
        noted = {"mode": "colocated", "why": "compare: pair 2"}
        assert (await http.post("/ridgeline/mode", json=noted)).status_code == 200
        assert app.live.mode_is_for == ("colocated", "compare: pair 2")
        assert (await http.post("/ridgeline/mode", json=noted | {"why": "x" * 201})).status_code == 422


async def test_the_commands_follow_an_operation_and_cancel_it():
    async with admin() as (_, _, _, app), listening(app) as url:
        console = a_console()
        scaling = asyncio.create_task(scale(url, {"decode": 2}, 1.0, admin_key_file=None, console=console))
        operation = await driver(app.book, sentences=("worker-2: starting [on core 1]",))
        await eventually(lambda: "worker-2: starting [on core 1]" in console.file.getvalue())
        assert f"operation {operation.operation_id}; `ridgeline scale --cancel` ends it" in console.file.getvalue()
        console = a_console()
        cancelling = asyncio.create_task(cancel(url, admin_key_file=None, console=console))
        assert (await app.book.take(PATIENCE_S)).cancels == operation.operation_id
        app.book.report(Progress(operation, "cancelled", (*app.book.last.sentences, "cancelled after 3 s")))
        await cancelling
        assert console.file.getvalue() == "  cancelled after 3 s\n"
        with pytest.raises(ServerError, match="cancelled after 3 s"):
            await scaling
        with pytest.raises(ServerError, match="answers 409"):  # in words where vLLM's app answers
            await cancel(url, admin_key_file=None, console=console)


async def test_the_command_says_that_an_operation_is_lost_which_no_router_knows(monkeypatch):
    monkeypatch.setattr("ridgeline.cluster.commands.operators.UNKNOWN_S", 0.0)
    async with admin() as (_, _, _, app), listening(app) as url:
        scaling = asyncio.create_task(scale(url, {"decode": 2}, 1.0, admin_key_file=None, console=a_console()))
        await driver(app.book)
        app.book.last = None  # as after the router's process has ended
        with pytest.raises(ServerError, match="has not told of operation"):
            await scaling


async def test_the_command_waits_as_long_for_a_change_of_mode_as_a_server_may_take():
    assert MODE_WITHIN_S > CHANGE_WITHIN_S + ANSWER_WITHIN_S - 1
    app, hangs = FastAPI(), asyncio.Event()
    app.add_api_route("/ridgeline/mode", hangs.wait, methods=["POST"])
    async with listening(app) as url, operator_client(url, None) as client:
        with pytest.raises(ServerError, match="ridgeline mode"):
            await ask(client, "POST", "/ridgeline/mode", dict, {}, within_s=0.05)
        hangs.set()


# --- who may


async def statuses(http, **headers):
    """Of both paths."""
    listed = await http.get("/ridgeline/workers", headers=headers)
    drained = await http.post("/ridgeline/drain", json={"worker": "none"}, headers=headers)
    return listed.status_code, drained.status_code


LET_IN = (200, 404)  # there is no worker of that name
FORBIDDEN = (403, 403)
UNAUTHORIZED = (401, 401)


def right(caller="127.0.0.1", access=LOCAL, keys=(), **headers):
    """What the rule says of a caller: its right, or the status of its refusal. Several values are several headers."""
    sent = [
        (name.lower().encode(), value.encode())
        for name, values in ({"host": "localhost"} | headers).items()
        for value in ([values] if isinstance(values, str) else values)
    ]
    try:
        return access.right({"client": (caller, 5), "scheme": "http", "headers": sent}, keys)
    except HttpRefusal as refusal:
        return refusal.status


HERE = ["127.0.0.1", "127.0.0.9", "::1", "::ffff:127.0.0.1"]
NAMES = ["localhost:8000", "127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "[::1]", "LOCALHOST"]
ELSEWHERE = ["10.0.0.7", "::ffff:10.0.0.7", "::127.0.0.1", "2001:db8::1", "0.0.0.0", ""]
PASSED_ON = [
    {"x-forwarded-for": "127.0.0.1"},
    {"X-Forwarded-For": "::1"},
    {"forwarded": "for=127.0.0.1"},
    {"x-real-ip": "127.0.0.1"},
    {"via": "1.1 proxy"},
    {"host": "rebound.example"},
    {"host": "10.0.0.7:8000"},
    {"host": "localhost.example"},
    {"host": "[2001:db8::1]:8000"},
]


@pytest.mark.parametrize(
    ("callers", "headers", "expected"),
    [
        pytest.param(HERE, [{"host": name} for name in NAMES], "local", id="on this machine by any of its names"),
        pytest.param(ELSEWHERE, [{}], 403, id="another machine"),
        pytest.param(["127.0.0.1", "10.0.0.7"], PASSED_ON, 403, id="passed on"),
    ],
)
def test_who_is_an_operator_without_admin_keys(callers, headers, expected):
    assert {right(caller, **each) for caller in callers for each in headers} == {expected}
    assert {right(caller, AdminAccess(clients_are_remote=True)) for caller in callers} == {403}


OTHER_PAGES = [
    *(
        {"origin": origin}
        for origin in ("http://elsewhere.example", "null", "", "file://", "http://localhost.evil.example")
    ),
    *({"origin": f"http://localhost{port}", "host": "localhost:8000"} for port in ("", ":3000", ":80000", ":8000/")),
    {"origin": "http://127.0.0.1:8000", "host": "localhost:8000"},
    {"origin": ["http://localhost", "http://elsewhere.example"]},
    {"origin": ["http://localhost", "http://localhost"]},
    {"origin": "http://localhost", "host": ["localhost", "elsewhere.example"]},
    {"origin": "http://localhost", "host": []},
    *({"sec-fetch-site": site} for site in ("cross-site", "same-site", "")),
    {"sec-fetch-site": "cross-site", "origin": "http://localhost"},
]
REBOUND = {"origin": "http://evil.example:8000", "host": "evil.example:8000"}
BEHIND_TLS = {"origin": "https://serving.example", "host": "serving.example"}


@pytest.mark.parametrize("access", [LOCAL, AdminAccess(KEYED.key_hashes)], ids=["here", "with a key"])
def test_of_pages_in_a_browser_only_the_servers_own_may_use_operators_paths(access):
    keys = (KEY.encode(),) if access.key_hashes else ()
    own = [{"origin": f"http://{name}", "host": name} for name in (*NAMES, "LOCALHOST:8000")]
    own += [{"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}, own[0] | {"sec-fetch-site": "same-origin"}]
    assert {right("127.0.0.1", access, keys, **each) for each in own} == {"key" if keys else "local"}
    assert {right("127.0.0.1", access, keys, **each) for each in OTHER_PAGES} == {403}


def test_a_page_whose_name_leads_here_has_no_right_without_a_key():
    assert right(**REBOUND) == 403
    assert right("127.0.0.1", KEYED, **REBOUND) == 401


def test_behind_a_proxy_that_ends_tls_the_own_page_needs_a_key_and_its_host():
    assert right("10.0.0.7", KEYED, (KEY.encode(),), **BEHIND_TLS) == "key"
    assert right("10.0.0.7", KEYED, **BEHIND_TLS) == 401
    assert right("10.0.0.7", KEYED, (KEY.encode(),), **BEHIND_TLS | {"host": "10.0.0.5:8000"}) == 403
    assert right("127.0.0.1", LOCAL, origin="https://localhost:8443", host="localhost:8443") == 403


async def test_an_admin_key_is_let_in_from_anywhere_and_nothing_else_is():
    async with admin("10.0.0.7", KEYED) as (http, _, _, _):
        assert await statuses(http, **BEARER) == LET_IN
        assert await statuses(http, **{"x-api-key": KEY}) == LET_IN
        assert await statuses(http, **BEARER, **{"x-forwarded-for": "192.0.2.1"}) == LET_IN
        assert await statuses(http, **BEARER, origin="http://elsewhere.example") == FORBIDDEN
    async with admin("127.0.0.1", KEYED) as (http, _, _, _):
        assert await statuses(http) == UNAUTHORIZED, "being on this machine is no key"
        assert await statuses(http, authorization=f"Bearer {KEY}x") == UNAUTHORIZED
        reply = await http.get("/ridgeline/workers", headers={"authorization": f"Bearer {KEY}x"})
        assert "--admin-key-file" in reply.json()["error"]["message"]
        assert KEY not in reply.text


async def test_no_way_of_writing_an_operators_path_leads_past_the_admin_key():
    async with admin("10.0.0.7", KEYED) as (http, _, _, _):
        for written in ("/ridgeline/drain", "/%72idgeline/drain", "/ridgeline//drain", "/ridgeline/x"):
            assert (await http.post(written, json={})).status_code == 401, written


async def test_the_paths_let_nobody_in_whom_no_guard_has_let_in():
    async with a_fleet([]) as fleet:
        app = FastAPI()
        app.include_router(
            admin_routes(
                fleet, OwnModes(fleet, lambda: 0), Operations(), EndedRequests(), None, recorder, asyncio.Event()
            )
        )
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            assert await statuses(http, **BEARER) == FORBIDDEN


# --- the command


async def test_the_command_tells_what_is_held_until_the_worker_is_gone():
    two = {"prefill": LAYOUT, "prefill_1": LAYOUT, "decode": LAYOUT}
    async with admin(**two) as (_, started, fleet, app), listening(app) as url:
        started[0]._engine._stepping = "manual"
        leg = asyncio.ensure_future(anext(task_deltas(fleet.get("prefill-0").client, a_task(leg="prefill"))))
        await eventually(lambda: started[0]._engine.running)
        console = a_console()
        draining = asyncio.create_task(drain(url, "prefill-0", 5, force=False, admin_key_file=None, console=console))
        await eventually(lambda: "draining: 1 requests" in console.file.getvalue())
        started[0]._engine.step()
        await leg
        await eventually(lambda: started[0].failure() == "drained", 20)
        assert not draining.done()
        await fleet.remove("prefill-0")  # the supervisor's part
        await draining
        assert console.file.getvalue().splitlines()[-1] == "prefill-0 (prefill) is gone"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        pytest.param({"mode": "disaggregated", "decisions": []}, "ridgeline mode adaptive", id="none in this mode"),
        pytest.param({"mode": "\x1b[2J\x9b1m[/nope]\n", "decisions": []}, "?[2J?1m[/nope]?", id="no cursor moves"),
        pytest.param({"mode": "adaptive", "decisions": [{}]}, None, id="another form"),
        pytest.param({"mode": "adaptive", "decisions": None}, None, id="none at all"),
    ],
)
async def test_the_command_that_explains_decisions_tells_what_it_can_read(answer, told):
    app, console = FastAPI(), a_console()
    app.add_api_route("/ridgeline/decisions", lambda: answer)
    async with listening(app) as url:
        with contextlib.nullcontext() if told else pytest.raises(ServerError):
            await decisions(url, 5, admin_key_file=None, console=console)
    assert (told or "") in console.file.getvalue()


async def test_the_commands_failures_are_sentences_that_name_what_to_do():
    console = a_console()
    with pytest.raises(ServerError, match="is the server running") as dead:
        await drain("http://127.0.0.1:9", "decode-0", 1, force=False, admin_key_file=None, console=console)
    assert is_quoted(str(dead.value))
    app = FastAPI()
    async with listening(app) as url:
        with pytest.raises(ServerError, match="answers 404: is it a Ridgeline server of this version"):
            await drain(url, "decode-0", 1, force=False, admin_key_file=None, console=console)


async def test_the_command_sends_the_first_admin_key_of_its_file_and_asks_for_one_when_it_is_missing(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("RIDGELINE_API_KEY", KEY)  # a client's: not for this
    file = tmp_path / "admin.keys"
    file.write_text(f"# operators\n{KEY}\nanother-key\n")
    console = a_console()
    two = {"prefill": LAYOUT, "prefill_1": LAYOUT, "decode": LAYOUT}
    async with admin(access=KEYED, **two) as (_, _, fleet, app), listening(app) as url:

        async def ask(key_file):
            await drain(url, "prefill-0", 0, force=False, admin_key_file=key_file, console=console)

        with pytest.raises(ServerError, match="--admin-key-file"):
            await ask(None)
        asked = asyncio.create_task(ask(file))
        await eventually(lambda: "takes no new requests" in console.file.getvalue())
        await fleet.remove("prefill-0")
        await asked
        for content, why in ((None, "cannot be read"), ("# none\n", "holds no key")):
            file.write_text(content) if content else file.unlink()
            with pytest.raises(ApiKeyError, match=why):
                await ask(file)


def test_an_admin_key_that_clients_have_too_is_refused_and_admin_keys_alone_leave_the_server_open(tmp_path):
    clients, admins = tmp_path / "clients", tmp_path / "admins"
    clients.write_text("one\nboth\n")
    admins.write_text("two\nboth\n")
    for file, environment in ((clients, {}), (None, {"RIDGELINE_API_KEYS": "two"})):
        with pytest.raises(ApiKeyError, match="client") as caught:
            key_hashes(file and str(file), str(admins), environment)
        assert "both" not in str(caught.value)
    found = key_hashes(None, str(admins), {}, metrics_keys_file=str(admins))
    assert (found.clients, found.admins) == (frozenset(), {hash_key(b"two"), hash_key(b"both")})
    assert (found.metrics, key_hashes(None, None, {}).metrics) == (found.admins, frozenset())


def test_no_key_is_in_what_is_explained_planned_or_sent_to_an_actor(tmp_path, monkeypatch):
    clients, admins = tmp_path / "clients", tmp_path / "admins"
    clients.write_text("a-clients-key\n")
    admins.write_text("an-admins-key\n")
    monkeypatch.setenv("RIDGELINE_API_KEYS", "a-key-of-the-environment")
    files = {"security.api_keys_file": str(clients), "security.admin_keys_file": str(admins)}
    loaded = load_config(None, files)
    keys = key_hashes(str(clients), str(admins))
    settings = router_settings(api_key_hashes=keys.clients, admin_key_hashes=keys.admins)
    console = Console(file=io.StringIO(), width=300)
    console.print(explain(loaded))
    shown = [console.file.getvalue().encode(), pickle.dumps(loaded.config), pickle.dumps(settings), repr(keys).encode()]
    assert str(admins).encode() in shown[0]
    for key in (b"a-clients-key", b"an-admins-key", b"a-key-of-the-environment"):
        assert not any(key in text for text in shown)


async def test_no_key_is_logged(caplog):
    caplog.set_level(0)
    async with admin(access=KEYED) as (http, _, _, _):
        for key in (KEY, "a-wrong-key"):
            wish = {"worker": "decode-0", "timeout_s": 0, "force": True}
            await http.post("/ridgeline/drain", json=wish, headers={"authorization": f"Bearer {key}"})
    assert "an operator drains decode-0" in caplog.text
    assert KEY not in caplog.text
    assert "a-wrong-key" not in caplog.text


FOREIGN_ANSWERS = [
    b"[]",
    b'"on"',
    b"null",
    b"{}",
    b'{"mode": 1, "operation": 2, "workers": [3]}',
    b'{"mode": "\xff"}',
    b"<html>",
]


@pytest.mark.parametrize("answer", FOREIGN_ANSWERS, ids=str)
async def test_every_command_says_so_if_another_program_answers_it(answer, tmp_path):
    app = FastAPI()
    for method in ("GET", "POST", "DELETE"):
        app.add_api_route("/{path:path}", lambda: Response(answer, media_type="application/json"), methods=[method])
    console, no_key = a_console(), {"admin_key_file": None}
    async with listening(app) as url:
        for command in (
            mode(url, None, **no_key, console=console),
            mode(url, "colocated", **no_key, console=console),
            drain(url, "decode-0", 1, force=False, **no_key, console=console),
            decisions(url, 5, **no_key, console=console),
            scale(url, {"decode": 2}, 1.0, **no_key, console=console),
            restart(url, 1.0, **no_key, console=console),
            cancel(url, **no_key, console=console),
        ):
            with pytest.raises(ServerError, match="in another form than this version"):
                await command
        with pytest.raises(ServerError, match="is it a Ridgeline server"):
            await watch(url, 0.0, 1, console)
        with pytest.raises(ServerError, match="with no recording: is it a Ridgeline server"):
            await record(tmp_path / "a.jsonl", url, 1.0, 1 << 20, **no_key, console=console)
        assert not (tmp_path / "a.jsonl").exists()
