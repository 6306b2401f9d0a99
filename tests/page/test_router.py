"""The page on a real router with two workers: requests, a change of mode by its button, a refusal, a lost worker."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio
from playwright.async_api import expect

from ridgeline.contracts.workers import Role
from tests.support.fake_engine import FakeEngine
from tests.support.patience import PATIENCE_S
from tests.support.served_router import make_model, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
WITHIN_MS = PATIENCE_S * 1000


def role(mode, pool):
    return Role(mode=mode, pool=pool, max_num_seqs=8, max_num_batched_tokens=512)


ROLES = {
    "disaggregated": {f"{pool}-0": role("disaggregated", pool) for pool in ("prefill", "decode")},
    "colocated": {f"{pool}-0": role("colocated", "colocated") for pool in ("prefill", "decode")},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return directory


async def test_an_operator_watches_requests_changes_the_mode_is_refused_and_sees_a_worker_die(browser, model):
    engines = FakeEngine("prefill"), FakeEngine("decode")
    async with serving(model, engines, roles=ROLES) as (http, router, _, decode):
        page = await browser.new_page()
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        await page.goto(str(http.base_url))
        await expect(page.locator("h1:visible")).to_contain_text("No requests", timeout=WITHIN_MS)
        body = {"model": "m", "prompt": "w1 w2 w3", "max_tokens": 4}
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(3)))
        assert [answer.status_code for answer in answers] == [200] * 3
        await expect(page.locator("button.gr")).to_have_count(3, timeout=WITHIN_MS)
        await page.locator("button.gr").first.click()
        await expect(page.locator("#open")).to_contain_text("prefill-0 → decode-0")

        await page.get_by_role("button", name="colocated…").click()
        await page.get_by_role("dialog").get_by_role("button", name="Change mode").click()
        await expect(page.locator("#who")).to_contain_text("2 colocated", timeout=WITHIN_MS)
        assert router.fleet.mode == "colocated"

        await router.fleet.get("prefill-0").client.drain(0)
        await router.fleet.refresh()
        await page.locator("#which").select_option("decode-0")
        await page.get_by_role("button", name="Drain…").click()
        await page.get_by_role("dialog").get_by_role("button", name="Drain").click()
        await expect(page.get_by_role("dialog")).to_contain_text("last colocated worker", timeout=WITHIN_MS)
        await page.keyboard.press("Escape")

        decode.failed = True
        await expect(page.locator("h1:visible")).to_contain_text("decode-0 (colocated) is lost", timeout=WITHIN_MS)
        await page.close()
        assert errors == []
