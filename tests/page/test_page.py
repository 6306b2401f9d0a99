"""What an operator and a stranger see of each state, and what they can do."""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.async_api import expect

from tests.page.samples import MARKUP, STATES, kept
from tests.support.page_server import PREFIX
from tests.support.patience import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEY = "an-operators-key"
LOOKS = [(360, "dark"), (1440, "light"), (360, "light"), (1440, "dark")]
"""Widths in pixels and colour schemes; the first two have each of them."""
SERIOUS = """axe.run({resultTypes: ["violations"]}).then(({violations}) => violations
    .filter(({impact}) => impact === "serious" || impact === "critical")
    .map(({id, nodes}) => `${id}: ${nodes[0].html}`))"""


async def has_no_fault(page, looks=2):
    """Nothing reaches beyond the window's side, and axe-core finds nothing serious."""
    await page.evaluate(AXE_SCRIPT)
    for width, scheme in LOOKS[:looks]:
        await page.set_viewport_size({"width": width, "height": 900})
        await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        await expect(page.locator("html")).to_have_attribute("data-theme", scheme)
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        assert (width, scheme, await page.evaluate(SERIOUS)) == (width, scheme, [])


# --- every state


@pytest.mark.parametrize("name", STATES)
async def test_each_state_is_drawn_without_a_fault(opened, name):
    state = STATES[name]()
    async with opened(state) as (_, page):
        await expect(page.locator("#page")).to_be_visible()
        sentence = (state["verdict"] or {}).get("sentence") or "It is not known which resource is short."
        await expect(page.locator("h1:visible")).to_have_text(sentence)
        requests = page.locator("button.gr")
        if await requests.count():
            await requests.first.click()
            await expect(page.locator("#open h3")).to_be_visible()
        await page.get_by_text("As a table").click()
        assert not re.search("NaN|undefined|null", await page.locator("#page").inner_html())
        assert await page.locator(".injected").count() == 0
        await has_no_fault(page, 4 if name == "worker_lost" else 2)


async def test_a_stranger_sees_name_model_readiness_and_links_without_a_fault(opened):
    async with opened(kept("healthy"), key=KEY) as (server, page):
        await expect(page.get_by_role("heading")).to_have_text("prod-eu serves Llama-3.1-8B-Instruct.")
        await expect(page.locator("#readiness")).to_have_text("It is ready.")
        assert [await each.get_attribute("href") for each in await page.locator("footer a").all()] == [
            *("metrics", "ready", "docs")
        ]
        await has_no_fault(page)
        assert not server.watchers


async def test_sentence_promise_roofline_and_pools_fit_a_laptops_window(opened):
    async with opened(kept("worker_lost")) as (_, page):
        await expect(page.locator(".cell.lost")).to_be_visible()
        assert await page.evaluate("document.querySelector('.mid').getBoundingClientRect().bottom") <= 900


async def test_what_is_short_or_lost_is_marked_and_nothing_else_is(opened):
    async with opened(kept("worker_lost")) as (_, page):
        await expect(page.locator("#res li.fault")).to_contain_text("Decode bandwidth")
        assert await page.locator("#res li:is(.short, .fault)").count() == 1
        await expect(page.locator(".cell.lost")).to_contain_text("worker-3")
        assert await page.locator(".cell.lost").count() == 1
        assert (await page.title()).startswith("▲ prod-eu: worker-3 (decode) died")


# --- the stream


async def test_later_events_leave_out_what_has_not_changed(opened):
    state = kept("worker_lost")
    async with opened(state) as (server, page):
        await expect(page.locator("button.gr")).to_have_count(len(state["requests"]))
        lines = page.locator("#promise .tile:last-child path[stroke='var(--fill)']")
        before = await lines.get_attribute("d")
        marks = page.locator("#promise path[stroke='var(--short)']")
        await expect(marks).to_have_count(5)
        bars = "[...document.querySelectorAll('#res .bar i')].map(each => each.style.width)"
        widths = await page.evaluate(bars)
        point = {name: each[-1:] if isinstance(each, list) else each for name, each in state["history"].items()}
        point["events"] = []  # which says nothing of those that were told before
        later = state | {"history": point, "requests": None, "time_unix_s": state["time_unix_s"] + 10}
        others = [each | {"detail": "another detail"} for each in state["resources"]]
        server.send(later | {"verdict": state["verdict"] | {"sentence": "All is well."}, "resources": others})
        await expect(page.locator("#sentence")).to_have_text("All is well.")
        await expect(page.locator("button.gr")).to_have_count(len(state["requests"]))
        assert (await lines.get_attribute("d")).count("L") == before.count("L") + 1
        await expect(page.locator("#res li").first).to_contain_text("another detail")
        assert await page.evaluate(bars) == widths
        await expect(marks).to_have_count(5)


async def test_a_stream_that_ends_is_opened_again_and_old_figures_are_called_old(opened):
    state = kept("healthy") | {"period_s": 0.3}
    async with opened(state) as (server, page):
        await expect(page.locator("#who")).to_contain_text("live")
        server.state = None
        server.end_streams()
        await expect(page.locator("#sentence")).to_contain_text("No answer from the router for")
        await expect(page.locator("#advice")).to_contain_text("the router is starting")
        await expect(page.locator("body")).to_have_class("old")
        await has_no_fault(page)
        server.state = state
        await expect(page.locator("#who")).to_contain_text("live", timeout=15_000)
        await expect(page.locator("#sentence")).to_have_text(state["verdict"]["sentence"])
        await expect(page.locator("body")).not_to_have_class("old")


async def test_a_router_that_is_not_there_yet_or_any_more_is_told_from_one_that_refuses(opened):
    async with opened(None) as (server, page):
        await expect(page.locator("#trouble")).to_have_text("the router is starting")
        await expect(page.locator("#keyform")).to_be_hidden()
        await page.route("**/ridgeline/state/stream", lambda route: route.abort())
        await expect(page.locator("#trouble")).to_have_text("The router does not answer; trying again…")
        await page.unroute("**/ridgeline/state/stream")
        server.state = kept("empty")
        await expect(page.locator("#sentence")).to_contain_text("No requests", timeout=15_000)


async def test_a_hidden_tab_costs_the_router_nothing(opened):
    hide = "hidden => {Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
    hide += "document.dispatchEvent(new Event('visibilitychange'))}"
    async with opened(kept("healthy")) as (server, page):
        await eventually(lambda: server.watchers == 1)
        await page.evaluate(hide, True)
        await eventually(lambda: server.watchers == 0)
        await page.evaluate(hide, False)
        await eventually(lambda: server.watchers == 1)


async def test_held_figures_stay_until_they_go_on(opened):
    state = kept("healthy")
    async with opened(state) as (server, page):
        await page.get_by_role("button", name="Hold").click()
        server.send(state | {"deployment": state["deployment"] | {"mode": "colocated"}})
        await asyncio.sleep(0.2)
        await expect(page.locator("#who")).to_contain_text("disaggregated")
        server.send(state | {"verdict": state["verdict"] | {"action": None}})
        await page.locator("button.gr").first.click()
        await expect(page.locator("#open h3")).to_be_visible()
        await page.get_by_role("button", name="Go on").click()
        await page.get_by_role("button", name="show newest").click()
        server.send(state | {"deployment": state["deployment"] | {"mode": "colocated"}})
        await expect(page.locator("#who")).to_contain_text("colocated")


async def test_a_connection_whose_other_end_has_gone_is_given_up(opened):
    state = kept("healthy") | {"period_s": 0.1}
    async with opened(state) as (server, page):
        await eventually(lambda: server.watchers == 1)
        await eventually(lambda: server.paths.count("/ridgeline/state/stream") == 2)
        await expect(page.locator("body")).not_to_have_class("old", timeout=15_000)


async def test_a_chosen_worker_and_a_focused_request_stay_so_when_others_come_and_go(opened):
    state = kept("healthy")
    async with opened(state) as (server, page):
        workers = [worker["id"] for pool in state["pools"] for worker in pool["workers"]]
        await page.locator("#which").select_option(workers[1])
        request = page.locator(f'[data-req="{state["requests"][0]["id"]}"]')
        await request.focus()
        pools = [pool | {"workers": pool["workers"][i == 0 :]} for i, pool in enumerate(state["pools"])]
        newest = state["requests"][0] | {"id": "chatcmpl-new", "ended_s_ago": 0.0, "ttft_ok": False}
        server.send(state | {"pools": pools, "requests": [newest, *state["requests"]]})
        await expect(page.locator('[data-req="chatcmpl-new"]')).to_be_visible()
        await expect(request).to_be_focused()
        await page.get_by_role("button", name="Drain…").click()
        await expect(page.get_by_role("button", name=f"Drain {workers[1]}")).to_be_visible()


async def test_the_page_works_below_a_proxys_prefix(opened):
    async with opened(kept("healthy"), path=f"{PREFIX}/") as (server, page):
        await expect(page.locator("#who")).to_contain_text("live")
        await page.get_by_role("button", name="Restart all…").click()
        await page.get_by_role("dialog").locator("button.main").click()
        await eventually(lambda: server.asked)
        assert {path.removeprefix(PREFIX) for path in server.paths if path.startswith(PREFIX)} == {
            *("/", "/ridgeline/state/stream", "/ridgeline/restart")
        }


# --- keys


async def test_a_key_opens_the_page_and_is_kept_by_the_tab_alone(opened):
    async with opened(kept("healthy"), key=KEY) as (server, page):
        field, button = page.get_by_label("An operator's key"), page.get_by_role("button", name="Show its figures")
        await field.fill(KEY + "\u200b")
        await button.click()
        await expect(page.locator("#trouble")).to_contain_text("character")
        await field.fill("another-key")
        await button.click()
        await expect(page.locator("#trouble")).to_contain_text("needs an admin key")
        await field.fill(KEY)
        await button.click()
        await expect(page.locator("#sentence")).to_be_visible()
        assert KEY not in page.url + await page.content()
        assert await page.evaluate("[localStorage.length, document.cookie, Object.values(sessionStorage)]") == [
            0,
            "",
            [KEY],
        ]
        await page.reload()
        await expect(page.locator("#sentence")).to_be_visible()
        await page.get_by_role("button", name="Drain…").click()
        await page.get_by_role("button", name="Drain worker-0").click()
        await eventually(lambda: server.asked)
        await page.get_by_role("button", name="Forget the key").click()
        await expect(field).to_be_visible()
        assert await page.evaluate("sessionStorage.length") == 0
        await eventually(lambda: server.watchers == 0)


async def test_a_stranger_asks_for_readiness_each_quarter_of_a_minute(opened):
    async with opened(kept("healthy"), key=KEY) as (server, page):
        server.ready = {"ready": False, "pools": {"decode": {"ready": False, "why": "no worker is connected"}}}
        await page.clock.install()
        await page.reload()
        await expect(page.locator("#readiness")).to_contain_text("It is not ready: decode: no worker is connected.")
        asked = server.paths.count("/ready")
        await page.clock.run_for(14_000)
        assert server.paths.count("/ready") == asked
        await page.clock.run_for(2_000)
        await eventually(lambda: server.paths.count("/ready") == asked + 1)


# --- changes


async def press_more(page):
    await page.get_by_role("button", name="one decode worker more").click()


async def choose_worker(page):
    await page.get_by_label("worker", exact=True).select_option("worker-2")


CHANGES = {
    "colocated…": (None, "ridgeline mode colocated", ("POST", "/ridgeline/mode", {"mode": "colocated"})),
    "Scale…": (press_more, "ridgeline scale decode=3", ("POST", "/ridgeline/scale", {"workers": {"decode": 3}})),
    "Drain…": (choose_worker, "ridgeline drain worker-2", ("POST", "/ridgeline/drain", {"worker": "worker-2"})),
    "Restart all…": (None, "ridgeline restart", ("POST", "/ridgeline/restart", {})),
    "Cancel it…": (None, "ridgeline scale --cancel", ("DELETE", "/ridgeline/operation", None)),
    "Move one…": (
        None,
        "ridgeline scale prefill=3 decode=1",
        ("POST", "/ridgeline/scale", {"workers": {"prefill": 3, "decode": 1}}),
    ),
}


def operated():
    """A deployment in which an operation runs, and a move of a worker is advised."""
    state = kept("healthy")
    state["operations"] = [{"running": True, "text": "scale decode=3: running"}]
    action = {"do": "scale", "args": {"prefill": 3, "decode": 1}, "label": "Move one…", "expect": "", "live": True}
    state["verdict"] |= {"action": action | {"command": "ridgeline scale prefill=3 decode=1"}, "advice": None}
    return state


@pytest.mark.parametrize("button", CHANGES)
async def test_a_change_asks_first_and_names_its_command_and_a_refusal_stays_readable(opened, button):
    before, command, request = CHANGES[button]
    async with opened(operated()) as (server, page):
        dialog, opener = page.get_by_role("dialog"), page.get_by_role("button", name=button)
        if before:
            await before(page)
        await opener.click()
        await expect(dialog.locator("code")).to_have_text(command)
        await expect(dialog.get_by_role("button", name="Cancel").first).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(dialog).to_be_hidden()
        await expect(opener).to_be_focused()
        assert server.asked == []

        server.refusal = HTTPStatus.CONFLICT, f"operation 7 is under way {MARKUP}"
        await opener.click()
        await dialog.locator("button.main").click()
        await expect(dialog.get_by_role("alert")).to_have_text(f"operation 7 is under way {MARKUP}")
        await expect(dialog.get_by_role("button", name="Close")).to_be_focused()
        await page.keyboard.press("Escape")
        assert server.asked == [request]

        server.refusal = None
        await opener.click()
        await dialog.locator("button.main").click()
        await expect(dialog).to_be_hidden()
        await expect(page.locator("#ops")).to_contain_text("the router has accepted it")
        assert server.asked == [request, request]


async def test_the_dialog_has_no_fault(opened):
    async with opened(operated()) as (_, page):
        await page.get_by_role("button", name="Move one…").click()
        await has_no_fault(page)


async def test_a_change_that_the_page_cannot_make_shows_its_command(opened):
    state = kept("worker_lost")
    async with opened(state) as (server, page):
        await page.get_by_role("button", name="Show why it died").click()
        await page.get_by_role("button", name="Copy command").click()
        assert await page.evaluate("getSelection().toString()") == "ridgeline logs --worker worker-3"
        assert server.asked == []


async def test_a_refusal_is_told_after_the_dialog_was_closed_too(opened):
    closed = asyncio.Event()

    async def late(route):
        await closed.wait()
        await route.continue_()

    async with opened(kept("healthy")) as (server, page):
        server.refusal = HTTPStatus.CONFLICT, "operation 7 is under way"
        await page.route("**/ridgeline/restart", late)
        await page.get_by_role("button", name="Restart all…").click()
        await page.get_by_role("dialog").locator("button.main").click()
        await page.keyboard.press("Escape")
        closed.set()
        await expect(page.locator("#ops")).to_contain_text("operation 7 is under way")


async def test_a_router_that_does_not_answer_is_told_in_the_dialog(opened):
    async with opened(kept("healthy")) as (_, page):
        await page.route("**/ridgeline/restart", lambda route: route.abort())
        await page.get_by_role("button", name="Restart all…").click()
        await page.get_by_role("dialog").locator("button.main").click()
        await expect(page.get_by_role("alert")).to_contain_text("The router did not answer")


# --- the keyboard


async def test_every_control_is_reached_by_tab_in_reading_order(opened):
    async with opened(STATES["large"]()) as (_, page):
        await expect(page.locator("#page")).to_be_visible()
        seen = []
        for _ in range(60):
            await page.keyboard.press("Tab")
            focused = (
                "(e => e.id || e.dataset.act || e.dataset.req || e.className || e.tagName)(document.activeElement)"
            )
            if (name := await page.evaluate(focused)) == "BODY":
                break
            seen.append(name)
        requests = [request["id"] for request in kept("healthy")["requests"]]
        assert [name for name in seen if name not in requests] == [
            *("skip", "hold", "theme", "SUMMARY", "dot ", "dot ", "axis", "axis", "mode", "mode"),
            *("less", "more", "less", "more", "which", "drain", "restart", "A", "A", "A"),
        ]
        assert sorted(set(seen) & set(requests)) == sorted(requests)


async def test_the_arrow_keys_go_from_worker_to_worker_and_focus_outlives_events(opened):
    state = STATES["large"]()
    async with opened(state) as (server, page):
        await page.locator(".dot").first.focus()
        await page.keyboard.press("ArrowRight")
        await expect(page.locator("#tip")).to_contain_text("worker-1 on host-a")
        for worker in state["pools"][0]["workers"]:
            worker["kv_used_ratio"] = 0.99
        server.send(state)
        await expect(page.locator(".dot").nth(1)).to_have_accessible_name(re.compile("worker-1: .* KV 99"))
        await expect(page.locator(".dot").nth(1)).to_be_focused()
        await page.keyboard.press("ArrowLeft")
        await expect(page.locator(".dot").first).to_be_focused()


async def test_an_open_request_holds_the_list_until_it_is_closed(opened):
    state = kept("healthy")
    first = state["requests"][0]["id"]
    async with opened(state) as (server, page):
        await page.locator(f'[data-req="{first}"]').focus()
        await page.keyboard.press("Enter")
        await expect(page.locator("#open h3")).to_have_text(first)
        server.send(state | {"requests": [state["requests"][0] | {"id": "chatcmpl-new"}]})
        await expect(page.locator("#gnote")).to_contain_text("Held while one is open")
        await expect(page.locator("button.gr")).to_have_count(len(state["requests"]))
        await page.get_by_role("button", name="show newest").click()
        await expect(page.locator("button.gr")).to_have_count(1)
        await page.get_by_role("button", name="on one clock").click()
        await expect(page.locator(".axis")).to_contain_text("now")
