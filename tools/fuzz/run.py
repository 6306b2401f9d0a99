"""The long run: each campaign gets its share of the examples, and afterwards the server must be unharmed.

usage: python -m tools.fuzz.run [--examples 100000] [--seed 1] [--only NAME]
"""

from __future__ import annotations

import argparse
import os
import time

from ridgeline.cluster.model_store import DEFAULT_MODEL_NAME, prepare_model
from tools.child import running
from tools.fuzz.campaigns import IN_PROCESS, Campaign, Footprint, connected

MOST_GROWTH = 0.05
"""Largest growth of resident memory, from the end of the warm-up to the end of a campaign."""
WARM_UP = 0.3
"""Fraction of a campaign's examples: caches fill, allocators settle, and vLLM compiles what it compiles once."""
SPARE_THREADS, SPARE_DESCRIPTORS = 4, 8
PROGRESS_EVERY_S = 5.0


def long_run(campaign: Campaign, examples: int, seed: int, pid: int) -> int:
    """Run one campaign and print what it took. Raises AssertionError if it fails or the process under test grows."""
    wanted = max(1, round(examples * campaign.share))
    footprints: list[tuple[int, Footprint]] = []
    began_s = shown_s = time.monotonic()

    def on_batch(checked: int) -> None:
        nonlocal shown_s
        footprints.append((checked, Footprint.of(pid)))
        if time.monotonic() - shown_s > PROGRESS_EVERY_S:
            shown_s = time.monotonic()
            _say(f"{campaign.name:<22} {checked:>6} of {wanted}  {shown_s - began_s:5.0f} s  {footprints[-1][1]}")

    checked = campaign.run(wanted, seed, on_batch)
    took_s = time.monotonic() - began_s
    warm = next(footprint for at, footprint in footprints if at >= WARM_UP * wanted)
    end = footprints[-1][1]
    growth = end.rss_bytes / warm.rss_bytes - 1
    _say(f"{campaign.name:<22} {checked:>6} examples in {took_s:4.0f} s; memory {growth:+.1%} to {end}")
    assert growth <= MOST_GROWTH, f"resident memory grew by {growth:.1%}: {warm}, then {end}"
    assert end.threads <= warm.threads + SPARE_THREADS, f"{warm}, then {end}"
    assert end.descriptors <= warm.descriptors + SPARE_DESCRIPTORS, f"{warm}, then {end}"
    return checked


def _say(sentence: str) -> None:
    print(sentence, flush=True)  # noqa: T201


def main() -> None:
    """Run all campaigns, or one; a failure prints the smallest input that shows it."""
    parser = argparse.ArgumentParser(description="Malformed frames, gRPC messages and HTTP requests")
    parser.add_argument("--examples", type=int, default=100_000, help="in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="the name of one campaign")
    args = parser.parse_args()
    checked, began_s = 0, time.monotonic()

    def chosen(campaigns: list[Campaign]) -> list[Campaign]:
        return [campaign for campaign in campaigns if args.only in (None, campaign.name)]

    for campaign in chosen(IN_PROCESS):
        checked += long_run(campaign, args.examples, args.seed, os.getpid())
    model = str(prepare_model(DEFAULT_MODEL_NAME))
    with running("tools.fuzz.server", model) as server, connected(server) as under_test:
        for campaign in chosen(under_test.campaigns):
            checked += long_run(campaign, args.examples, args.seed, server.pid)
            under_test.require_unharmed()
    _say(f"\nseed {args.seed}, {checked} examples, {time.monotonic() - began_s:.0f} s, no failure")


if __name__ == "__main__":
    main()
