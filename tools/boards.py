"""Writes the boards of deploy/grafana/: python -m tools.boards. A board is rows of panels; the SDK makes its JSON.

Series are those of docs/reference/metrics.md and of deploy/prometheus/recording.yml.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

FOLDER = Path(__file__).parents[1] / "deploy" / "grafana"
SOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")
COLUMNS, ROWS = 8, 8
"""Of a panel: a third of Grafana's 24 columns."""
QUANTILES = (0.5, 0.9, 0.99)


class Line(NamedTuple):
    """A query, and the legend of its lines."""

    query: str
    legend: str


class Panel(NamedTuple):
    """Lines of one unit, as Grafana names it."""

    title: str
    unit: str
    lines: list[Line]
    text: str = ""


def legend(name: str, labels: str) -> str:
    """Return the legend of lines that have these labels."""
    return " ".join([*filter(None, [name]), *(f"{{{{{each}}}}}" for each in labels.split(", ") if each)])


def level(series: str, labels: str = "", name: str = "") -> Line:
    """Return a gauge of the chosen deployments."""
    return Line(f'{series}{{instance=~"$instance"}}', legend(name, labels))


def total(series: str, labels: str = "", name: str = "", how: str = "sum") -> Line:
    """Return a gauge, added up by these labels."""
    return Line(f"{how} by ({labels}) ({level(series).query})", legend(name, labels))


def rate(series: str, labels: str = "", name: str = "", only: str = "") -> Line:
    """Return the rate of a counter, added up by these labels; `only` are further matchers."""
    matchers = ", ".join(filter(None, ['instance=~"$instance"', only]))
    return Line(f"sum by ({labels}) (rate({series}{{{matchers}}}[$__rate_interval]))", legend(name, labels))


def share(part: Line, whole: Line) -> Line:
    """Return a ratio, with the legend of its part."""
    return Line(f"{part.query} / {whole.query}", part.legend)


def mean(series: str, labels: str, only: str = "") -> Line:
    """Return the mean of a histogram."""
    return share(rate(f"{series}_sum", labels, only=only), rate(f"{series}_count", labels, only=only))


def quantile(part: float, series: str, labels: str, only: str = "") -> Line:
    """Return a quantile of a histogram."""
    buckets = rate(f"{series}_bucket", f"le, {labels}", only=only).query
    return Line(f"histogram_quantile({part}, {buckets})", legend(f"p{100 * part:g}", labels))


def quantiles(series: str, labels: str = "pool", only: str = "") -> list[Line]:
    """Return the usual quantiles of a histogram."""
    return [quantile(part, series, labels, only) for part in QUANTILES]


def by_mode(line: Line) -> Line:
    """Label a figure of each deployment with the mode in which it serves."""
    mode = level("ridgeline_mode").query
    return Line(f"{line.query} * on (job, instance) group_left (mode) {mode}", legend("", "instance, mode"))


SLOS, REQUESTS, LINK = "ridgeline_slo_sequences_total", "ridgeline_requests_total", "ridgeline_link_bytes_total"
MET, ALL_MET = 'met="yes"', 'slo="all", met="yes"'
EACH = "job, instance"
LINK_RATE = share(rate(LINK, "transport"), rate("ridgeline_link_seconds_total", "transport"))
FASTEST = total("ridgeline_link_fastest_bytes_per_second", "transport", "fastest", how="max")
TEXT_TIME = share(
    rate("ridgeline_text_seconds_total", "instance", "text"), rate("ridgeline_text_events_total", "instance")
)
HITS = share(
    rate("ridgeline_prefix_cache_hit_tokens_total", "pool"), rate("ridgeline_prefix_cache_query_tokens_total", "pool")
)
SEQUENCES = rate(SLOS, "slo")
ATTAINMENT = Line(f"({rate(SLOS, 'slo', only=MET).query} or 0 * {SEQUENCES.query}) / {SEQUENCES.query}", "{{slo}}")
OVERVIEW = {
    "Promise": [
        Panel("TTFT", "s", quantiles("ridgeline_ttft_seconds"), "By the pool that made the token."),
        Panel("TPOT", "s", quantiles("ridgeline_tpot_seconds")),
        Panel("ITL", "s", quantiles("ridgeline_itl_seconds"), "Between deltas, each of one token or more."),
        Panel(
            "Attainment",
            "percentunit",
            [ATTAINMENT, Line("ridgeline:slo_objective:ratio", "objective")],
            "Finished sequences that met their SLO, of those that have one.",
        ),
        Panel("Goodput", "reqps", [rate(SLOS, "", "within SLOs", ALL_MET), rate(REQUESTS, "outcome")]),
        Panel("Refused", "reqps", [rate("ridgeline_rejected_total", "reason")]),
    ],
    "Traffic": [
        Panel("Sequences by path", "reqps", [rate(REQUESTS, "path")]),
        Panel(
            "Tokens per second",
            "short",
            [
                rate("ridgeline_prefix_cache_query_tokens_total", "", "of prompts"),
                rate("ridgeline_output_tokens_total", "", "of answers"),
            ],
        ),
        Panel("Sequences in service", "short", [total("ridgeline_requests_in_flight", "instance")]),
        Panel("Mode", "short", [level("ridgeline_mode", "mode")]),
        Panel(
            "Workers", "short", [level("ridgeline_workers", "pool"), level("ridgeline_unusable_workers", "pool, state")]
        ),
        Panel("End to end", "s", quantiles("ridgeline_e2e_seconds")),
    ],
    "Router": [
        Panel("Own stages", "s", quantiles("ridgeline_stage_seconds", "stage", 'stage=~"preprocess|dispatch"')),
        Panel(
            "CPU", "percentunit", [rate("ridgeline_router_cpu_seconds_total", "instance, router")], "At most one core."
        ),
        Panel("Lag", "s", [level("ridgeline_loop_lag_seconds", "instance"), TEXT_TIME], "Of the router that answered."),
    ],
    "Prediction": [
        Panel("Error, median", "percentunit", [quantile(0.5, "ridgeline_prediction_error_ratio", "latency")]),
        Panel("Error of step models", "percentunit", [level("ridgeline_step_model_error_ratio", "worker")]),
        Panel("Decisions", "reqps", [rate("ridgeline_decisions_total", "choice, reason")]),
    ],
    "Faults": [
        Panel(
            "Restarts in 5 minutes",
            "short",
            [
                level("ridgeline:worker_restarts:increase5m", "worker, reason"),
                level("ridgeline_away_workers", name="away"),
            ],
        ),
        Panel("Moved to another worker", "reqps", [rate("ridgeline_retries_total", "state, cause")]),
        Panel("Pause of moved streams", "s", quantiles("ridgeline_continuation_pause_seconds", "state")),
    ],
}
POOLS = {
    "Roofline": [
        Panel(
            "Arithmetic intensity against the ridge",
            "short",
            [
                level("ridgeline:pool_intensity:ratio_rate5m", "pool"),
                level("ridgeline:pool_ridge:ratio", "pool", "ridge"),
            ],
            "FLOPs per byte. Below the ridge memory bandwidth binds, above it compute.",
        ),
        Panel(
            "MFU and MBU",
            "percentunit",
            [
                level("ridgeline:pool_mfu:ratio_rate5m", "pool", "MFU"),
                level("ridgeline:pool_mbu:ratio_rate5m", "pool", "MBU"),
            ],
            "Of the peaks, while engines are in steps.",
        ),
        Panel("Time in engine steps", "percentunit", [level("ridgeline:pool_busy:ratio_rate5m", "pool")]),
        Panel("Steps", "cps", [rate("ridgeline_steps_total", "pool, step")]),
        Panel("Tokens computed per second", "short", [rate("ridgeline_tokens_total", "pool, phase")]),
        Panel(
            "Speculation",
            "percentunit",
            [
                share(
                    rate("ridgeline_accepted_tokens_total", "pool", "accepted"),
                    rate("ridgeline_drafted_tokens_total", "pool"),
                ),
                share(
                    rate("ridgeline_accepted_tokens_total", "pool", "gained"),
                    rate("ridgeline_sequence_steps_total", "pool"),
                ),
            ],
            "Accepted: of the drafted tokens. Gained: tokens per step and sequence, beyond one.",
        ),
        Panel("Bytes moved", "Bps", [rate("ridgeline_bytes_total", "pool, kind")]),
    ],
    "Queues": [
        Panel("Prompts that wait in the router", "short", [level("ridgeline_waiting_prompts", "pool")]),
        Panel("Tokens that wait in the router", "short", [level("ridgeline_waiting_prompt_tokens", "pool")]),
        Panel("Wait", "s", quantiles("ridgeline_queue_seconds", "pool, where")),
        Panel(
            "Sequences in engines",
            "short",
            [
                total("ridgeline_running", "pool", "running"),
                total("ridgeline_waiting", "pool", "waiting"),
                total("ridgeline_max_num_seqs", "pool", "most"),
            ],
        ),
        Panel("Shortened chunks", "cps", [rate("ridgeline_shortened_chunks_total", "pool")]),
    ],
    "Cache": [
        Panel("KV blocks in use", "percentunit", [level("ridgeline:pool_kv_used:ratio", "pool")]),
        Panel("Prefix hits", "percentunit", [HITS], "Of the prompt tokens that workers looked for."),
    ],
}
HANDOFFS = {
    "Latency": [
        Panel("Second token", "s", quantiles("ridgeline_second_token_seconds"), "Its gap includes the hand-off."),
        Panel(
            "Stages, mean", "s", [mean("ridgeline_stage_seconds", "stage", 'stage=~"handoff_wait|wire|decode_queue"')]
        ),
        Panel("Overlapped with prefill", "reqps", [rate("ridgeline_overlapped_handoffs_total", "result")]),
    ],
    "Link": [
        Panel("Transfer rate", "Bps", [LINK_RATE, FASTEST], "Of hand-offs that were not fetched during prefill."),
        Panel(
            "Part of the fastest seen",
            "percentunit",
            [Line(f"{LINK_RATE.query} / on (transport) {FASTEST.query}", LINK_RATE.legend)],
        ),
        Panel("Later turns fetched", "reqps", [rate("ridgeline_reused_kv_total", "result")]),
        Panel("KV moved", "Bps", [rate("ridgeline_kv_transfer_bytes_total", "pool, direction")]),
        Panel("Pairs of workers", "short", [level("ridgeline_kv_pair", "transport, why")]),
    ],
    "Failures": [
        Panel("Served whole instead", "percentunit", [level("ridgeline:fallback:ratio_rate5m", "instance")]),
        Panel("Fetches", "reqps", [rate("ridgeline_fetches_total", "result")]),
        Panel("Prompts computed on decode", "reqps", [rate("ridgeline_recompute_total", "reason")]),
        Panel(
            "Leases",
            "short",
            [
                total("ridgeline_leases", "", "open"),
                total("ridgeline:expired_leases:increase5m", "", "expired in 5 minutes"),
            ],
        ),
        Panel("KV blocks pinned", "short", [level("ridgeline_pinned_blocks", "worker")]),
        Panel("First token", "reqps", [rate("ridgeline_first_token_total", "mode, reason")]),
    ],
}
COMPARISON = {
    "Measured now": [
        Panel("Mode", "short", [level("ridgeline_mode", "instance, mode")]),
        Panel("Sequences that end", "reqps", [by_mode(rate(REQUESTS, EACH))]),
        Panel("Refused", "reqps", [by_mode(rate("ridgeline_rejected_total", EACH))]),
    ],
    "Within the SLOs": [
        Panel(
            "Goodput",
            "reqps",
            [by_mode(rate(SLOS, EACH, only=ALL_MET))],
            "Of requests with an SLO of their own, or router.slo's.",
        ),
        Panel("TTFT, p90", "s", [by_mode(quantile(0.9, "ridgeline_ttft_seconds", EACH))]),
        Panel("TPOT, p90", "s", [by_mode(quantile(0.9, "ridgeline_tpot_seconds", EACH))]),
    ],
    "Why": [
        Panel("Time in engine steps", "percentunit", [level("ridgeline:pool_busy:ratio_rate5m", "instance, pool")]),
        Panel("Prompts that wait", "short", [level("ridgeline_waiting_prompts", "instance, pool")]),
        Panel("KV blocks in use", "percentunit", [level("ridgeline:pool_kv_used:ratio", "instance, pool")]),
    ],
}
BOARDS = {
    "overview": ("Ridgeline: overview", OVERVIEW),
    "pools": ("Ridgeline: pools and roofline", POOLS),
    "handoffs": ("Ridgeline: hand-offs", HANDOFFS),
    "comparison": ("Ridgeline: a comparison that runs", COMPARISON),
}


def written(name: str) -> str:
    """Return Grafana's JSON of a board."""
    title, rows = BOARDS[name]
    instances = (
        dashboard.QueryVariable("instance").datasource(SOURCE).query("label_values(ridgeline_build_info, instance)")
    )
    board = (
        dashboard.Dashboard(title)
        .uid(f"ridgeline-{name}")
        .tags(["ridgeline"])
        .time("now-30m", "now")
        .refresh("10s")
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
        .with_variable(instances.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).multi(True).include_all(True))
    )
    for row, panels in rows.items():
        board = board.with_row(dashboard.Row(row))
        for panel in panels:
            board = board.with_panel(_panel(panel))
    return f"{JSONEncoder(sort_keys=True, indent=1).encode(board.build())}\n"


def _panel(panel: Panel) -> timeseries.Panel:
    made = timeseries.Panel().title(panel.title).description(panel.text).unit(panel.unit).datasource(SOURCE).min(0)
    for number, line in enumerate(panel.lines):
        made = made.with_target(prometheus.Dataquery().expr(line.query).legend_format(line.legend).ref_id(f"Q{number}"))
    return made.span(COLUMNS).height(ROWS)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for _name in BOARDS:
        (FOLDER / f"{_name}.json").write_text(written(_name), encoding="utf-8")
