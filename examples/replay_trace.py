"""Replay a trace against a running server, open loop, and use the figures in Python.

    ridgeline serve -c deploy/local.yaml
    python examples/replay_trace.py --url http://127.0.0.1:8000 --rate 1 --limit 30

The default trace is the demo's. Any OpenAI-compatible server works; only Ridgeline's reports pools and stages.
"""

from __future__ import annotations

import argparse
import asyncio

from rich.console import Console

from ridgeline.loadtest.plan import ReplayPlan, Slo
from ridgeline.loadtest.report.summary import summarise
from ridgeline.loadtest.run.replay import run_replay


async def main() -> None:
    """Print goodput, and the request that was slowest to its first token."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--trace", default="demo", help="a file, or poisson:rate=2,input=512,output=64,n=100")
    parser.add_argument("--rate", type=float, help="requests/s; default: the trace's own times")
    parser.add_argument("--limit", type=int, default=30, help="the first N requests")
    options = parser.parse_args()

    slo = Slo(ttft_ms=2000, tpot_ms=100)
    plan = ReplayPlan(trace=options.trace, rate=options.rate, limit=options.limit)
    result = await run_replay(options.url, plan, Console())

    figures = summarise(result.counted_records, result.window_s, slo)
    print(f"{figures['completed']} of {len(result.counted_records)} requests completed in {result.duration_s:.1f} s")
    print(f"attainment of {slo}: {figures['attainment']:.0%}, goodput {figures['request_goodput']:.2f} requests/s")
    answered = [record for record in result.records if record.ttft_s is not None]
    if answered:
        slowest = max(answered, key=lambda record: record.ttft_s or 0.0)
        print(f"slowest TTFT: request {slowest.index}, {slowest.input_tokens} tokens in, {slowest.ttft_s:.3f} s")


if __name__ == "__main__":
    asyncio.run(main())
