"""Compare two modes, then read the result as a table with a row per request.

    python examples/compare_modes.py --out runs/example            # starts engines; about five minutes
    python examples/compare_modes.py --read runs/example           # only reads what is there

It writes requests.csv beside the run. pandas and polars are not among our dependencies; with one of them:
`pandas.read_csv("requests.csv")`, or `polars.read_ndjson("records.jsonl")` with the times between tokens too.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RIDGELINE = Path(sys.executable).parent / "ridgeline"
COLUMNS = (
    *("variant", "mode", "pair", "round", "index", "scheduled_s", "input_tokens", "output_tokens"),
    *("ttft_s", "tpot_s", "latency_s", "error"),
)


def compare(out: Path, options: list[str]) -> None:
    """Run `ridgeline compare` as a shell would; `options` replace or add to its own."""
    command = [str(RIDGELINE), "compare", "-c", "deploy/local.yaml", "--out", str(out.resolve())]
    auto = ["--trace", "demo", "--length-scale", "0.5", "--rate", "auto", "--slo", "auto", "--budget-s", "240"]
    subprocess.run([*command, *(options or auto)], cwd=ROOT, check=True)


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return a row for each request of the rounds that counted."""
    rounds = json.loads((run / "summary.json").read_text())["rounds"]
    counted = {each["round"] for each in rounds if each["valid"]}
    records = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    return [{name: record[name] for name in COLUMNS} for record in records if record["round"] in counted]


def main() -> None:
    """Compare unless told only to read, write requests.csv, and print the medians of each mode and the outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/example"), help="a folder that does not exist yet")
    parser.add_argument("--read", type=Path, help="the folder of a finished run")
    options, for_compare = parser.parse_known_args()
    if options.read is None:
        compare(options.out, for_compare)
    run = options.read or options.out

    rows = rows_of(run)
    with (run / "requests.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(rows)
    for mode in sorted({row["mode"] for row in rows}):
        mine = [row for row in rows if row["mode"] == mode and row["error"] is None]
        ttft, tpot = ([row[name] for row in mine if row[name] is not None] for name in ("ttft_s", "tpot_s"))
        medians = f"median TTFT {statistics.median(ttft):.3f} s, TPOT {1e3 * statistics.median(tpot):.1f} ms"
        print(f"{mode}: {len(mine)} requests, {medians}")
    print(json.loads((run / "summary.json").read_text())["outcome"]["sentence"])


if __name__ == "__main__":
    main()
