"""The document of the live page: whole in itself, and closed to what is elsewhere."""

from __future__ import annotations

import json
import re

import httpx
import msgspec
import pytest

from ridgeline.router.front.page import PageFacts, page
from ridgeline.router.live.state import PageState
from tests.page.samples import FOLDER, kept
from tests.support.page_server import FACTS, serving_page

FACTS_ELEMENT = re.compile(r'<script id="facts" type="application/json">(.*?)</script>', re.DOTALL)


@pytest.mark.parametrize("name", ["prod-eu", "</script><script>alert(1)</script>", "<!--<script>", "\u2028\"'&"])
def test_facts_are_told_as_they_are_and_end_no_script(name):
    document = page(PageFacts(name, "m", "1")).decode()
    assert json.loads(FACTS_ELEMENT.search(document)[1]) == {"name": name, "model": "m", "version": "1"}
    assert (document.count("<script"), document.count("</script>")) == (2, 2)


def test_nothing_comes_from_elsewhere():
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page(FACTS).decode())


async def test_a_browser_may_load_nothing_from_elsewhere_and_neither_keep_nor_frame_it():
    async with serving_page(None) as server, httpx.AsyncClient(base_url=server.url) as http:
        reply = await http.get("/")
        assert (reply.status_code, reply.headers["cache-control"]) == (200, "no-store")
        policy = dict(rule.strip().split(" ", 1) for rule in reply.headers["content-security-policy"].split(";"))
        closed = ("default-src", "base-uri", "form-action", "frame-ancestors")
        assert {name: policy[name] for name in closed} == dict.fromkeys(closed, "'none'")
        assert (policy["connect-src"], policy["img-src"]) == ("'self'", "data:")
        assert all(policy[name].startswith("'sha256-") for name in ("script-src", "style-src"))
        assert (await http.head("/")).status_code == 200


@pytest.mark.parametrize("name", [path.stem for path in FOLDER.glob("*.json")])
def test_the_states_that_are_kept_are_such_as_a_router_sends(name):
    assert json.loads(msgspec.json.encode(msgspec.convert(kept(name), PageState))) == kept(name)
