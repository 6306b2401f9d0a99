"""What /metrics says a client waited is what the client says: a real router, real hosts, engines of known times."""

import asyncio
import random
import time
from statistics import fmean

import pytest

from ridgeline.loadtest.run.client.stream import Completion, LoadClient, encode_body
from ridgeline.loadtest.run.server import first_model, open_http
from ridgeline.loadtest.run.server_metrics import difference, scrape

PROMPT_TOKENS, OUTPUT_TOKENS = 40, 25
MOST_ROUNDS = 4
NEAR_S = {"ttft": 0.25, "itl": 0.02}
"""Of the means: other processes may hold the cores while one side looks at its clock."""


@pytest.mark.parametrize("streams", [1, 20])
async def test_the_mean_ttft_and_itl_of_the_server_are_the_clients(url, streams):
    for _ in range(MOST_ROUNDS):
        async with open_http(url) as http, LoadClient([url], {}) as client:
            model, before, began_s = (await first_model(http)).id, await scrape(http), time.perf_counter()
            bodies = [encode_body(model, random.choices(range(10, 190), k=PROMPT_TOKENS), OUTPUT_TOKENS)] * streams
            asked = [Completion(index, 0.0, PROMPT_TOKENS, OUTPUT_TOKENS, body) for index, body in enumerate(bodies)]
            records = await asyncio.gather(*(client.complete(one, began_s, 300.0) for one in asked))
            gained = difference(before, await scrape(http), time.perf_counter() - began_s)
        assert [record.error for record in records] == [None] * streams
        seen = {"ttft": [record.ttft_s for record in records], "itl": [gap for one in records for gap in one.itls_s]}
        for name, seconds in seen.items():
            assert gained.total(f"ridgeline_{name}_seconds_count") == len(seconds)
        ours_s = {name: fmean(seconds) for name, seconds in seen.items()}
        theirs_s = {name: gained.total(f"ridgeline_{name}_seconds_sum") / len(seen[name]) for name in seen}
        if all(abs(ours_s[name] - theirs_s[name]) < NEAR_S[name] for name in seen):
            return
    pytest.fail(f"{ours_s} s by the client, {theirs_s} by the server")
