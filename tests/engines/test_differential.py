"""Samples of `make differential`: random requests to a deployment and to plain vLLM get the same answers."""

from __future__ import annotations

import pytest

from tests.engines.harness import Figure
from tools.differential.run import Variant, judged, paths, random_cases, tiny

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

SEED = 2
CASES = 10


async def same_answers(variant: Variant, figure: Figure, at_once: int = 1) -> str:
    """Of both, to as many requests; what the router has counted."""
    said: list[str] = []
    async with tiny(variant, said.append) as servers:
        cases = random_cases(servers.plan, SEED, CASES)
        verdicts = await judged(servers, cases, said.append, at_once)
        ways = await paths(servers.split)
    tied = sum(bool(verdict.ties) for verdict in verdicts)
    figure(f"seed {SEED}: {CASES} requests in {servers.plan.dtype}, {tied} with ties")
    assert [verdict.case.number for verdict in verdicts if verdict.difference] == [], "\n".join(said)
    assert sum(verdict.status == 200 for verdict in verdicts) > CASES * 3 / 4, "most of them are answered, not refused"
    assert 'ridgeline_requests_total{outcome="finished",path="disaggregated"}' in ways
    return ways


async def test_random_requests_are_answered_as_by_plain_vllm(pytestconfig: pytest.Config, figure: Figure):
    ways = await same_answers(Variant(pytestconfig.getoption("--dtype")), figure)
    assert "ridgeline_overlapped_handoffs_total" in ways


@pytest.mark.long  # a minute each
@pytest.mark.parametrize(
    ("variant", "at_once", "counted"),
    [
        pytest.param(Variant("float32", family="gemma3"), 1, "ridgeline_kv_transfer_bytes_total", id="windows"),
        pytest.param(Variant("float32", family="granite4h"), 1, "ridgeline_kv_transfer_bytes_total", id="states"),
        pytest.param(Variant("float32", adapters=True), 4, "ridgeline_kv_transfer_bytes_total", id="adapters"),
        pytest.param(Variant("float32", drafts=True), 1, "ridgeline_accepted_tokens_total", id="drafts"),
    ],
)
async def test_so_are_those_with_windows_states_adapters_or_drafts(
    variant: Variant, at_once: int, counted: str, figure: Figure
):
    assert counted in await same_answers(variant, figure, at_once)
