"""deploy/prometheus/ and deploy/grafana/ name series that exist, Prometheus accepts them, and each alert fires."""

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.series_table import documented

REPOSITORY = Path(__file__).parents[2]
PROMETHEUS, GRAFANA = (REPOSITORY / "deploy" / name for name in ("prometheus", "grafana"))
BOARDS = sorted(GRAFANA.glob("*.json"))
RULE_FILES = [PROMETHEUS / f"{name}.yml" for name in ("recording", "vllm", "alerts")]
CONFIGS = sorted(PROMETHEUS.glob("prometheus*.yml"))
RUNBOOKS = REPOSITORY / "docs" / "how-to" / "operate.md"
OF_TARGETS = {"job", "instance"}
NAME = re.compile(r"\b(?:ridgeline|vllm)[_:][a-z0-9_:]+")
SELECTOR = re.compile(r"(ridgeline_\w+)\{([^}]*)\}")
SUMMED = re.compile(r"sum by \(([^)]*)\) \((?:rate\()?(ridgeline_\w+)")
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not there: install `prometheus`")


def rules(path):
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def queries(path):
    """All PromQL of a file of rules or of a board."""
    if path.suffix == ".yml":
        return [rule["expr"] for rule in rules(path)]
    return [query["expr"] for panel in json.loads(path.read_text())["panels"] for query in panel.get("targets", ())]


ALL_RULES = [rule for path in RULE_FILES for rule in rules(path)]
ALERTS = [rule for rule in ALL_RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in ALL_RULES if "record" in rule}


def labels_of_series():
    """Labels by series as scraped; a histogram is three series."""
    found = {}
    for name, (kind, _, labels) in documented().items():
        names = [f"{name}_{part}" for part in ("bucket", "sum", "count")] if kind == "histogram" else [name]
        found |= dict.fromkeys(names, labels | OF_TARGETS | {"le"})
    return found


@pytest.mark.parametrize("path", [*RULE_FILES, *BOARDS], ids=lambda path: path.name)
def test_every_series_and_label_that_is_asked_for_exists(path):
    known, asked = labels_of_series(), queries(path)
    assert asked
    for query in asked:
        assert not set(NAME.findall(query)) - known.keys() - RECORDED, query
        for series, matchers in SELECTOR.findall(query):
            assert set(re.findall(r"(\w+)[=!]", matchers)) <= known[series], query
        for labels, series in SUMMED.findall(query):
            assert set(filter(None, labels.split(", "))) <= known.get(series, set()) | {"engine"}, query


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.name)
@pytest.mark.skipif(
    importlib.util.find_spec("grafana_foundation_sdk") is None,
    reason="grafana-foundation-sdk is not there: it is in the extra `dev`",
)
def test_a_board_is_what_the_code_makes(path):
    from tools.boards import BOARDS as MADE
    from tools.boards import written

    assert {board.stem for board in BOARDS} == MADE.keys()
    assert path.read_text() == written(path.stem), "run `python -m tools.boards` to write it anew"


@promtool
def test_prometheus_accepts_every_query_of_the_boards(tmp_path):
    asked = [query for board in BOARDS for query in queries(board)]
    recorded = [
        {"record": f"query:{number}", "expr": query.replace("$__rate_interval", "1m").replace("$instance", ".*")}
        for number, query in enumerate(asked)
    ]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "boards", "rules": recorded}]}))
    told("check", "rules", str(file))


@promtool
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_prometheus_accepts_the_configuration_and_its_rules(path, tmp_path):
    shutil.copytree(PROMETHEUS, tmp_path, dirs_exist_ok=True)
    config = yaml.safe_load(path.read_text())
    for job in config["scrape_configs"]:
        # Debian builds Prometheus without the discovery in Kubernetes. What is checked is the rest of the file.
        job.pop("kubernetes_sd_configs", None)
    (tmp_path / path.name).write_text(yaml.safe_dump(config))
    told("check", "config", str(tmp_path / path.name))


def told(*arguments):
    answer = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_every_release_in_kubernetes_is_found_and_named_alike_with_the_operator_and_without():
    chart = pytest.importorskip("tools.chart", reason="helm-python-sdk is not there: it is in the extra `dev`")
    wanted = {"enabled": True, "labels": {}}
    documents = yaml.safe_load_all(chart.rendered("values-one-node.yaml", "second", serviceMonitor=wanted))
    found = {document["kind"]: document for document in documents}
    labels, spec = found["Service"]["metadata"]["labels"], found["ServiceMonitor"]["spec"]
    assert labels == {"app.kubernetes.io/name": "ridgeline", "app.kubernetes.io/instance": "second"}
    [job] = yaml.safe_load((PROMETHEUS / "prometheus-kubernetes.yml").read_text())["scrape_configs"]
    keep, deployment = job["relabel_configs"]
    service_label, port = "__meta_kubernetes_service_label_app_kubernetes_io_", "__meta_kubernetes_endpoint_port_name"
    assert keep == {"source_labels": [f"{service_label}name", port], "regex": "ridgeline;http", "action": "keep"}
    namespace_and_release = ["__meta_kubernetes_namespace", f"{service_label}instance"]
    assert deployment == {"source_labels": namespace_and_release, "separator": "/", "target_label": "deployment"}
    assert spec["selector"]["matchLabels"] == labels, "else it finds a second release of its namespace too"
    assert spec["endpoints"][0]["relabelings"] == [
        {"targetLabel": "job", "replacement": job["job_name"]},
        {"sourceLabels": namespace_and_release, "separator": "/", "targetLabel": "deployment"},
    ]


def test_every_alert_has_a_runbook():
    headings = re.findall(r"^### (\w+)$", RUNBOOKS.read_text(), re.MULTILINE)
    assert headings == [rule["alert"] for rule in ALERTS]
    for rule in ALERTS:
        assert rule["annotations"]["runbook_url"] == f"docs/how-to/operate.md#{rule['alert'].lower()}"


REQUESTS, SLOS = "ridgeline_requests_total", 'ridgeline_slo_sequences_total{slo="all", met='
ROUTER_CPU = 'ridgeline_router_cpu_seconds_total{router="router-1"}'
CASES = [
    ("RidgelineDown", {"up": "1x4 0x8 1x8"}, {"1m": 0, "150s": 1, "4m": 0}),
    ("RidgelineDown", {"up": "1x4 stale"}, {"1m": 0, "150s": 1}),
    ("RidgelineSloBurn", {SLOS + '"yes"}': "0+6x40", SLOS + '"no"}': "0+4x40"}, {"8m": 1}),
    ("RidgelineSloBurn", {SLOS + '"no"}': "0+4x40"}, {"8m": 1}),
    ("RidgelineSloBurn", {SLOS + '"yes"}': "0+8x40", SLOS + '"no"}': "0+2x40"}, {"8m": 0}),
    *(
        (
            "RidgelineRequestsFailing",
            {REQUESTS + '{outcome="failed"}': "0+2x40", REQUESTS + f'{{outcome="{other}"}}': f"0+{others}x40"},
            {"8m": fires},
        )
        for other, others, fires in (("finished", 8, 1), ("finished", 30, 0), ("cancelled", 30, 1))
    ),
    ("RidgelinePoolEmpty", {'ridgeline_workers{pool="decode"}': "1x4 0x8 1x8"}, {"1m": 0, "150s": 1, "4m": 0}),
    ("RidgelinePoolStarved", {'ridgeline_waiting_prompts{pool="prefill"}': "3x60"}, {"9m": 0, "12m": 1}),
    ("RidgelinePoolStarved", {'ridgeline_waiting_prompts{pool="prefill"}': "3x30 0 3x30"}, {"12m": 0}),
    *(
        (
            "RidgelineHandoffsFailing",
            {REQUESTS + '{path="fallback"}': "0+1x60", REQUESTS + '{path="disaggregated"}': f"0+{others}x60"},
            {"12m": fires},
        )
        for others, fires in ((50, 1), (200, 0))
    ),
    ("RidgelineLeasesExpiring", {"ridgeline_expired_leases_total": "_x21 1x40"}, {"5m": 0, "6m": 1, "11m": 0}),
    ("RidgelineLeasesExpiring", {"ridgeline_expired_leases_total": "7x40 _ 7x40"}, {"11m": 0, "13m": 0}),
    ("RidgelineLeasesExpiring", {"ridgeline_expired_leases_total": "1x40 2x40"}, {"10m": 0, "11m": 1}),
    ("RidgelineLeasesExpiring", {"ridgeline_expired_leases_total": "_x10 1x40", "up": "_x10 1x40"}, {"4m": 0}),
    ("RidgelineLeasesExpiring", {"ridgeline_expired_leases_total": "1x10 _x2 1x40", "up": "1x10 0x1 1x40"}, {"4m": 0}),
    *(
        (
            "RidgelineWorkerRestarting",
            {f'ridgeline_worker_restarts_total{{pool="decode", worker="worker-1", reason="{reason}"}}': "_x21 1x40"},
            {"5m": 0, "6m": fires, "11m": 0},
        )
        for reason, fires in (("actor_died", 1), ("ordered", 0))
    ),
    ("RidgelineWorkerAway", {"ridgeline_away_workers": "0x4 1x4 0x4"}, {"1m": 0, "90s": 1, "3m": 0}),
    *(
        (
            "RidgelineRouterSaturated",
            {ROUTER_CPU: f"0+{cpu_s}x40"},
            {"8m": fires},
        )
        for cpu_s, fires in ((14.5, 1), (10, 0))
    ),
]


@promtool
def test_each_alert_fires_when_it_should_and_only_then(tmp_path):
    tests = [
        {
            "interval": "15s",
            "name": alert,
            "input_series": [
                {"series": of_target(series), "values": values} for series, values in ({"up": "1x60"} | given).items()
            ],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) or vector(0)',
                    "eval_time": time,
                    "exp_samples": [{"labels": "{}", "value": fires}],
                }
                for time, fires in expected.items()
            ],
        }
        for alert, given, expected in CASES
    ]
    file = tmp_path / "alerts.test.yml"
    document = {"rule_files": list(map(str, RULE_FILES)), "evaluation_interval": "15s", "tests": tests}
    file.write_text(yaml.safe_dump(document))
    told("test", "rules", str(file))


def test_each_alert_is_tested_in_both_directions():
    told_of = {(alert, bool(fires)) for alert, _, expected in CASES for fires in expected.values()}
    assert told_of == {(rule["alert"], fires) for rule in ALERTS for fires in (True, False)}


def of_target(series):
    name, _, labels = series.partition("{")
    return f'{name}{{job="ridgeline", instance="a"{", " if labels else ""}{labels or "}"}'
