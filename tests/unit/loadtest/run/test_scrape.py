"""Reading /metrics where it is closed: with the key, or with a sentence that says which one is missing."""

import httpx
import pytest

from ridgeline.loadtest.errors import ServerError
from ridgeline.loadtest.run.server_metrics import scrape

PAGE = "# TYPE ridgeline_running gauge\nridgeline_running 1\n"


def closed(request):
    opened = request.headers.get("authorization") == "Bearer reader"
    return httpx.Response(200, text=PAGE) if opened else httpx.Response(401, json={"error": {}})


async def test_a_closed_page_is_read_with_its_key_and_without_it_the_error_names_the_variable(monkeypatch):
    async with httpx.AsyncClient(transport=httpx.MockTransport(closed), base_url="http://here") as client:
        with pytest.raises(ServerError, match=r"set RIDGELINE_METRICS_KEY to one of its security\.metrics_keys_file"):
            await scrape(client)
        monkeypatch.setenv("RIDGELINE_METRICS_KEY", "reader")
        read = await scrape(client)
        assert read is not None
        assert list(read.gauges.values()) == [1.0]
