"""A sample of `make differential`: random requests to a deployment and to plain vLLM get the same answers."""

from __future__ import annotations

import pytest

from tests.engines.harness import Figure
from tools.differential.run import judged, paths, random_cases, tiny

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

SEED = 2
CASES = 10


async def test_random_requests_are_answered_as_by_plain_vllm(pytestconfig: pytest.Config, figure: Figure):
    said: list[str] = []
    async with tiny(pytestconfig.getoption("--dtype"), said.append) as servers:
        cases = random_cases(servers.plan, SEED, CASES)
        verdicts = await judged(servers, cases, said.append)
        ways = await paths(servers.split)
    tied = sum(bool(verdict.ties) for verdict in verdicts)
    figure(f"seed {SEED}: {CASES} requests in {servers.plan.dtype}, {tied} with ties")
    assert [verdict.case.number for verdict in verdicts if verdict.difference] == [], "\n".join(said)
    assert sum(verdict.status == 200 for verdict in verdicts) > CASES * 3 / 4, "most of them are answered, not refused"
    assert 'ridgeline_requests_total{outcome="finished",path="disaggregated"}' in ways
    assert "ridgeline_overlapped_handoffs_total" in ways
