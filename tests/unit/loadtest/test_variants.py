"""How a variant is reached: by a restart, or by a switch of a running deployment."""

import contextlib
import json

import httpx
import pytest

from ridgeline.loadtest.errors import ServerError
from ridgeline.loadtest.variants import Deployments, SwitchedVariant


async def test_an_variant_keeps_its_deployment_until_the_other_has_its_turn():
    events = []

    @contextlib.asynccontextmanager
    async def serve(mode):
        events.append(f"start {mode}")
        yield f"http://{len(events)}"
        events.append(f"stop {mode}")

    async with Deployments(serve) as deployments:
        a, b = deployments.variant("colocated"), deployments.variant("colocated")
        assert await deployments.start(a) == "http://1"
        first, again = await a.ready(), await a.ready()
        assert (first.is_fresh, again.is_fresh) == (True, False)
        assert first.server == again.server
        assert (await b.ready()).is_fresh, "the same mode, but another variant"
    assert events == ["start colocated", "stop colocated"] * 2


class _Server:
    """The admin route of a deployment."""

    def __init__(self, modes=("colocated", "disaggregated"), obeys=True) -> None:
        self.mode, self.modes, self.obeys = "colocated", list(modes), obeys
        self.asked: list[tuple[str, str | None]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.headers.get("authorization") != "Bearer admin":
            return httpx.Response(401)
        wanted = json.loads(request.content)["mode"] if request.content else None
        self.asked.append((request.method, wanted))
        self.mode = wanted if wanted and self.obeys else self.mode
        why_not = {"disaggregated": "one worker cannot have two roles"}
        return httpx.Response(200, json={"mode": self.mode, "modes": self.modes, "why_not": why_not})


def _variant(server: _Server, mode: str) -> SwitchedVariant:
    headers = {"authorization": "Bearer admin"}
    return SwitchedVariant("http://server", mode, headers, httpx.MockTransport(server))


async def test_a_running_deployment_is_switched_and_only_if_it_must_be():
    server = _Server()
    a, b = _variant(server, "colocated"), _variant(server, "disaggregated")
    assert (await a.ready()).is_fresh, "its workers are still cold"
    assert (await b.ready()).is_fresh
    assert not (await b.ready()).is_fresh
    assert not (await a.ready()).is_fresh
    assert [asked for asked in server.asked if asked[0] == "POST"] == [("POST", "disaggregated"), ("POST", "colocated")]
    assert a.start_s == 0
    await a.ready("compare: pair 2")
    assert server.asked[-1] == ("POST", "colocated"), "also in the mode that it has, since the round is another one"


async def test_a_mode_that_a_deployment_cannot_serve_is_told_with_its_reason():
    assert await _variant(_Server(), "disaggregated").obstacle() is None
    assert (
        await _variant(_Server(modes=["colocated"]), "disaggregated").obstacle() == "one worker cannot have two roles"
    )
    with pytest.raises(ServerError, match="cannot serve disaggregated: one worker cannot have two roles"):
        await _variant(_Server(modes=["colocated"]), "disaggregated").ready()
    with pytest.raises(ServerError, match="was asked for disaggregated and says that it serves colocated"):
        await _variant(_Server(obeys=False), "disaggregated").ready()
    with pytest.raises(ServerError, match=r"cannot be switched to colocated: .*401"):
        await SwitchedVariant("http://server", "colocated", {}, httpx.MockTransport(_Server())).ready()
