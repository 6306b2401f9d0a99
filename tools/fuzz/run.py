"""The long run: each target gets its share of the examples, and afterwards the server must be unharmed.

usage: python -m tools.fuzz.run [--examples 100000] [--seed 1] [--only NAME]
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, field

from ridgeline.cluster.model_store import DEFAULT_MODEL_NAME, prepare_model
from tools.fuzz.campaign import Footprint, run
from tools.fuzz.server_process import serving
from tools.fuzz.targets import Target, connected, in_process

MOST_GROWTH = 0.05
"""Largest growth of resident memory, from the end of the warm-up to the end of a campaign."""
WARM_UP = 0.3
"""Fraction of a campaign's examples: caches fill, allocators settle, and vLLM compiles what it compiles once."""
SPARE_THREADS, SPARE_DESCRIPTORS = 4, 8
PROGRESS_EVERY_S = 5.0


@dataclass
class Ledger:
    """Records what was checked and the resources it took."""

    seed: int
    lines: list[str] = field(default_factory=list)
    checked: int = 0

    def run(self, target: Target, examples: int, pid: int) -> None:
        """Run one campaign. Raises AssertionError if it fails or the process under test grows."""
        wanted = max(1, round(examples * target.share))
        footprints: list[tuple[int, Footprint]] = []
        began_s = shown_s = time.monotonic()

        def on_batch(checked: int) -> None:
            nonlocal shown_s
            footprints.append((checked, Footprint.of(pid)))
            if time.monotonic() - shown_s > PROGRESS_EVERY_S:
                shown_s = time.monotonic()
                told = f"{target.campaign.name:<22} {checked:>6} of {wanted}  {shown_s - began_s:5.0f} s"
                print(f"{told}  {footprints[-1][1]}", flush=True)  # noqa: T201

        checked = run(target.campaign, wanted, self.seed, on_batch)
        took_s = time.monotonic() - began_s
        warm = next(footprint for at, footprint in footprints if at >= WARM_UP * wanted)
        end = footprints[-1][1]
        growth = end.rss_bytes / warm.rss_bytes - 1
        self.checked += checked
        self.lines.append(
            f"{target.campaign.name:<22} {checked:>6} examples in {took_s:4.0f} s; memory {growth:+.1%} to {end}"
        )
        assert growth <= MOST_GROWTH, f"resident memory grew by {growth:.1%}: {warm}, then {end}"
        assert end.threads <= warm.threads + SPARE_THREADS, f"{warm}, then {end}"
        assert end.descriptors <= warm.descriptors + SPARE_DESCRIPTORS, f"{warm}, then {end}"


def main() -> None:
    """Run all targets, or one; a failure prints the smallest input that shows it."""
    parser = argparse.ArgumentParser(description="Malformed frames, gRPC messages and HTTP requests")
    parser.add_argument("--examples", type=int, default=100_000, help="in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="the name of one target")
    args = parser.parse_args()
    ledger, began_s = Ledger(args.seed), time.monotonic()

    def chosen(targets: list[Target]) -> list[Target]:
        return [target for target in targets if args.only in (None, target.campaign.name)]

    for target in chosen(in_process()):
        ledger.run(target, args.examples, os.getpid())
    with serving(prepare_model(DEFAULT_MODEL_NAME)) as server, connected(server) as under_test:
        for target in chosen(under_test.targets):
            ledger.run(target, args.examples, server.pid)
            under_test.require_unharmed()
    print(f"\nseed {args.seed}, {ledger.checked} examples, {time.monotonic() - began_s:.0f} s, no failure")  # noqa: T201
    print("\n".join(ledger.lines))  # noqa: T201


if __name__ == "__main__":
    main()
