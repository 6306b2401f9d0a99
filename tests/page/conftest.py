"""A browser, and its pages before a server of the test."""

from __future__ import annotations

import os
import shutil
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from playwright.async_api import async_playwright

from tests.support.page_server import serving_page

BROWSERS = ("chromium", "google-chrome", "chromium-browser")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser():
    """Chromium without a window; it is skipped, and says why, where there is none."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"there is no browser here: install {' or '.join(BROWSERS)}")
    sandbox = [] if os.getuid() else ["--no-sandbox"]  # root has none
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=sandbox)
        yield browser
        await browser.close()


@pytest.fixture
def opened(browser):
    """Opens the page of a server that is in this state; an error that the page makes fails the test."""

    @asynccontextmanager
    async def open_page(state, *, key="", path="/", **options):
        errors = []
        async with serving_page(state, key) as server:
            page = await browser.new_page(**{"viewport": {"width": 1440, "height": 900}, **options})
            page.on("pageerror", lambda error: errors.append(f"{error} {error.stack}"))
            page.on("console", lambda message: errors.append(message.text) if is_error(message) else None)
            try:
                await page.goto(server.url + path)
                yield server, page
            finally:
                await page.close()
        assert errors == []

    return open_page


def is_error(message):
    """A refused request is told by the browser too, and is no error of the page."""
    return message.type in ("error", "warning") and not message.text.startswith("Failed to load resource")
