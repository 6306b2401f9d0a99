"""Compare all modes over rates, then read the result as a data frame with a row per request.

    python examples/compare_modes.py --out runs/example            # starts engines; about five minutes
    python examples/compare_modes.py --read runs/example           # only reads what is there

The frame is polars', which Ridgeline installs; `pandas.read_parquet("records.parquet")` reads the same file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import polars as pl

ROOT = Path(__file__).parents[1]
RIDGELINE = Path(sys.executable).parent / "ridgeline"


def compare(out: Path, options: list[str]) -> None:
    """Run `ridgeline compare` as a shell would; `options` replace or add to its own."""
    command = [str(RIDGELINE), "compare", "-c", "deploy/local.yaml", "--out", str(out.resolve())]
    auto = ["--trace", "demo", "--length-scale", "0.5", "--slo", "auto", "--budget-s", "285"]
    subprocess.run([*command, *(options or auto)], cwd=ROOT, check=True)


def requests_of(run: Path) -> pl.DataFrame:
    """Return a row for each request of the rounds that counted."""
    return pl.read_parquet(run / "records.parquet").filter("valid")


def by_rate_and_mode(requests: pl.DataFrame) -> pl.DataFrame:
    """Return what each mode did at each rate: the share within the SLOs, medians of the requests that finished."""
    finished = pl.col("error").is_null()
    return (
        requests.group_by(pl.col("rate").round_sig_figs(3), "mode")
        .agg(
            requests=pl.len(),
            failed=(~finished).sum(),
            met_slos=pl.col("met_slos").mean(),
            median_ttft_s=pl.col("ttft_s").filter(finished).median(),
            median_tpot_ms=1e3 * pl.col("tpot_s").filter(finished).median(),
            largest_itl_ms=1e3 * pl.col("itls_s").filter(finished).list.max().max(),
        )
        .sort("rate", "mode")
    )


def main() -> None:
    """Compare unless told only to read, and print the figures of each mode at each rate, and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/example"), help="a folder that does not exist yet")
    parser.add_argument("--read", type=Path, help="the folder of a finished run")
    options, for_compare = parser.parse_known_args()
    if options.read is None:
        compare(options.out, for_compare)
    run = options.read or options.out

    with pl.Config(tbl_rows=-1, tbl_cols=-1, float_precision=3, tbl_hide_dataframe_shape=True, tbl_width_chars=140):
        print(by_rate_and_mode(requests_of(run)))
    summary = json.loads((run / "summary.json").read_text())
    print(summary["verdict"]["sentences"][0])


if __name__ == "__main__":
    main()
