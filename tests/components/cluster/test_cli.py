"""The `ridgeline` command: exit status, what names the fix, and nothing started when something is wrong."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import typer
from typer.testing import CliRunner

import ridgeline.cluster.cli
import ridgeline.cluster.commands.loadtest
import ridgeline.cluster.commands.own_variants
import ridgeline.cluster.commands.replay
import ridgeline.cluster.commands.serve
import ridgeline.cluster.runtime.ray_start
from ridgeline.cluster.cli import app
from ridgeline.cluster.commands.own_variants import devices_of, equal_hardware, split_workers
from ridgeline.cluster.commands.setup import versions
from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.doctor.checks import CheckResult
from ridgeline.cluster.errors import ServingError
from ridgeline.loadtest.plan import MODES, ComparePlan, ReplayPlan
from ridgeline.loadtest.run.calibration import Load, Workers
from ridgeline.loadtest.run_folder import RunFolder, Settled
from ridgeline.loadtest.variants import Devices
from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly
from tests.support.openai_server import Behaviour, running
from tests.support.patience import PATIENCE_S

COMMANDS = (
    *("serve", "status", "stop", "logs", "doctor", "model"),
    *("roofline", "replay", "compare", "report", "bench", "trace"),
)
NOWHERE = "http://127.0.0.1:9"
TWO_SERVERS = ["--server", f"one={NOWHERE}", "--server", f"two={NOWHERE}"]
ROOFLINE = ["roofline", "--model", "mixtral-8x7b", "--hardware", "h100-sxm"]


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch):
    def started(*args, **kwargs):
        raise AssertionError("this command must not start anything")

    monkeypatch.setattr(ray, "init", started)
    monkeypatch.setattr(ridgeline.cluster.commands.own_variants, "ray_runtime", started)
    monkeypatch.setattr(ridgeline.cluster.commands.serve, "ray_runtime", started)


@pytest.fixture
def run_ridgeline():
    """Run a command; (exit status, stdout, stderr in one line)."""

    def run(*args):
        result = CliRunner().invoke(app, [str(arg) for arg in args])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, " ".join(result.stderr.split())

    return run


# --- what is refused


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_is_refused_by_name_and_help_lists_every_command(run_ridgeline, command):
    status, _, error = run_ridgeline(command, "--frobnicate")
    assert status == 2
    assert "--frobnicate" in error
    assert command in run_ridgeline("--help")[1]


def test_version_tells_ours_and_that_of_the_engine_and_help_says_so(run_ridgeline):
    status, output, _ = run_ridgeline("--version")
    told = dict(word.split(" ", 1) for word in output.strip().split(", "))
    assert status == 0
    assert told == {name: value for name, value in versions().items() if value}
    assert {"ridgeline", "python", "vllm"} <= told.keys()
    assert "--version" in run_ridgeline("--help")[1]


@pytest.mark.parametrize("command", [["serve"], ["doctor"], ["compare", "--out", "x"]], ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("server.port", "section.key=value"),
        ("server.prot=1", "did you mean server.port?"),
        ("server.port=high", "server.port"),
        ("nonsense.at.all=1", "nonsense.at.all"),
        ("pools.prefill.workers=0", "pools.prefill.workers"),
        ("[/x]", "[/x]"),
        ("[red]server.port", "[red]server.port"),
        ("server.port=[/]", "server.port"),
        ("a[b]=1", "a[b]"),
    ],
)
def test_a_wrong_setting_ends_every_command_with_a_sentence_that_names_it(run_ridgeline, command, setting, part):
    status, _, error = run_ridgeline(*command, "--set", setting)
    assert status == 2
    assert error.startswith("error:")
    assert part in error


OUT = "OUT"
"""Stands for a folder that is not there yet."""


@pytest.mark.parametrize(
    ("command", "status", "parts"),
    [
        pytest.param(["sreve"], 2, ["sreve"], id="unknown_command"),
        *(
            pytest.param([*words, "--timeout-s", "inf"], 2, ["--timeout-s"], id=f"{words[0]}_without_end")
            for words in (["drain", "worker-1"], ["scale", "decode=1"], ["restart"])
        ),
        *(
            pytest.param([*words, "--url", url], 2, ["[::1]:8000"], id=f"{words[0]}_{url}")
            for words in (["top"], ["drain", "worker-1"], ["replay"])
            for url in ("http://::1:8000", "127.0.0.1:8000", "http://", "ftp://x", "http://key@x", "http://x:y")
        ),
        pytest.param(["serve", "--config", "/no/none.yaml"], 2, ["none.yaml"], id="no_file"),
        pytest.param(
            ["serve", "--set", "server.prot=1", "--set", "pools.decode.workers=0"],
            2,
            ["server.prot", "pools.decode.workers"],
            id="every_problem",
        ),
        pytest.param(
            ["serve", "--set", "server.port=1", "--set", "server.port=2"],
            2,
            ["--set server.port is given twice"],
            id="twice",
        ),
        pytest.param(["roofline", "--model", "llama-3.1-8b", "--hardware", "h1000"], 1, ["h1000"], id="hardware"),
        pytest.param([*ROOFLINE, "--dtype", "bf17"], 1, ["bf17"], id="dtype"),
        pytest.param([*ROOFLINE, "--model", "/no/such"], 1, ["/no/such"], id="shape"),
        pytest.param(["model", "/no/such/model"], 1, ["/no/such/model"], id="model"),
        *(
            pytest.param([*command, *options], status, [part], id=f"{command[0]}{'_'.join(options)}")
            for command in (["replay", "--url", NOWHERE], ["compare", "--out", OUT])
            for options, status, part in (
                (["--trace", "no-such.csv"], 1, "'no-such.csv'"),
                (["--trace", "poisson:rate=fast"], 1, "poisson"),
                (["--rate", "0"], 2, "--rate: "),
                (["--rate", "fast"], 2, "'fast'"),
                (["--rate", "auto", "--trace", "poisson:n=1"], 1, "arrivals"),
                (["--slo", "auto", "--slo-ttft-ms", "2000"], 2, "slo_ttft_ms"),
                (["--limit", "0"], 2, "limit: "),
                (["--jitter-s", "nan"], 2, "--jitter-s: "),
                (["--slo-ttft-ms", "-1"], 2, "--slo-ttft-ms: "),
            )
        ),
        pytest.param(
            ["replay", "--url", NOWHERE, "--trace", "poisson:rate=2,input=8,output=2,n=2"], 1, [NOWHERE], id="no_server"
        ),
        pytest.param(["report", "/no/such"], 1, ["/no/such"], id="no_run"),
        pytest.param(["compare"], 2, ["--out"], id="compare_without_folder"),
        pytest.param(["compare", "--out", OUT, "--resume", OUT], 2, ["--out", "--resume"], id="compare_two_folders"),
        pytest.param(["compare", "--resume", OUT], 1, [OUT], id="nothing_to_resume"),
        pytest.param(["compare", "--warmup-requests", "5"], 2, ["--warmup-requests"], id="option_of_replay"),
        *(
            pytest.param(["compare", "--out", OUT, *flags], 2, parts, id=f"compare{'_'.join(flags)}")
            for flags, parts in (
                (["--pairs=0"], ["pairs: "]),
                (["--served-model-name=llama"], ["--served-model-name llama", "model.served_model_name"]),
                (["--set=pools.colocated.workers=3"], ["2 cores", "3: change pools.colocated.workers"]),
                (["--set=pools.decode.cores_per_worker=2"], ["3 cores", "or cores_per_worker"]),
                (
                    ["--set=pools.decode.kv_cache_memory_bytes=2 GiB"],
                    ["3,072 MiB", "2,048 MiB", "kv_cache_memory_bytes"],
                ),
                (["--set=ray.share_cores=true"], ["ray.share_cores"]),
                (["--set=transfer.faults=seed=7,drop=0.02"], ["transfer.faults (seed=7,drop=0.02)"]),
                (["--server", "one=http://h:1"], ["6 variants, not 1"]),
                (["--server", "one=h:1"], ["'h:1'"]),
                ([*TWO_SERVERS, "--devices", "vllm=2"], ["vllm", "one, two"]),
                ([*TWO_SERVERS, "--set", "server.port=8123"], ["--variants"]),
            )
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name_before_anything_starts(run_ridgeline, tmp_path, command, status, parts):
    out = str(tmp_path / "out")
    found, _, error = run_ridgeline(*(out if part == OUT else part for part in command))
    assert found == status
    assert all((out if part == OUT else part) in error for part in parts), error
    assert not Path(out).exists()


def test_every_problem_is_told_one_a_line():
    result = CliRunner().invoke(app, ["serve", "--set", "server.prot=1", "--set", "pools.decode.workers=0"])
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["error", "error"]


@pytest.mark.parametrize(
    ("command", "module"), [(["serve"], "serve"), (["compare", "--out", "x"], "own_variants")], ids=["serve", "compare"]
)
def test_an_unfit_machine_is_told_every_fix_and_nothing_starts(run_ridgeline, monkeypatch, tmp_path, command, module):
    def unfit(config):
        raise ServingError("Free some memory.", "Use another port [8001].")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(f"ridgeline.cluster.commands.{module}.refuse_unfit_machine", unfit)
    status, _, error = run_ridgeline(*command)
    assert (status, error) == (1, "error: Free some memory. error: Use another port [8001].")


# --- serve, doctor and roofline


@pytest.mark.parametrize("value", ["2", "1e3", "null", "models #1", "2026-11-28", "a: b", "\u00fcber"])
def test_a_flag_is_taken_as_it_was_typed(run_ridgeline, value):
    status, out, _ = run_ridgeline("serve", "--explain", "--model", value)
    assert status == 0
    assert (value, "flag") == re.search(r"model.path +\u2502 (.*?) +\u2502 (\w+)", out).groups()


def test_explain_shows_effective_values_and_their_origin_and_starts_nothing(run_ridgeline, tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("router:\n  max_concurrent_requests: 77\n", encoding="utf-8")
    flags = ("--port", "8123", "--prefill", "3", "--mode", "colocated")
    status, shown, _ = run_ridgeline("serve", "--config", file, *flags, "--explain")
    assert status == 0
    rows = {cells[0]: cells[1:] for line in shown.splitlines() if len(cells := line.replace("│", " ").split()) >= 3}
    assert rows["server.port"] == ["8123", "flag"]
    assert rows["pools.prefill.workers"] == ["3", "flag"]
    assert rows["mode"] == ["colocated", "flag"]
    assert rows["pools.decode.workers"] == ["1", "default"]
    assert rows["router.max_concurrent_requests"][0] == "77"
    assert "my.yaml" in "".join(shown.replace("│", " ").split()), "a long path is broken over lines"


@pytest.mark.parametrize("cores_ok", [True, False])
def test_doctor_judges_the_configuration_it_is_given_and_ends_with_1_if_something_is_wrong(
    run_ridgeline, monkeypatch, cores_ok
):
    def checks(config):
        detail = f"{config.pools.decode.workers} needed, {config.mode}"
        return [CheckResult("cores", cores_ok, detail, "Lower workers.")]

    monkeypatch.setattr("ridgeline.cluster.doctor.checks.checks", checks)
    status, shown, _ = run_ridgeline("doctor", "--mode", "colocated", "--set", "pools.decode.workers=5")
    assert status == (0 if cores_ok else 1)
    assert "5 needed, colocated" in shown
    assert "Lower workers." in shown


def test_roofline_prints_a_table_or_json_that_a_program_can_read(run_ridgeline):
    status, shown, _ = run_ridgeline(*ROOFLINE, "--json")
    assert status == 0
    assert "h100" in json.dumps(json.loads(shown)).lower()
    status, shown, _ = run_ridgeline(*ROOFLINE)
    assert status == 0
    assert "ridge" in shown.lower()


# --- replay and compare


@pytest.mark.parametrize(("command", "kind"), [("replay", ReplayPlan), ("compare", ComparePlan)])
def test_every_field_of_the_plan_is_an_option_that_says_what_it_does(command, kind):
    options = {one.name: one for one in typer.main.get_command(app).commands[command].params}
    for name, field in kind.model_fields.items():
        if name in kind.fixed:
            assert name not in options
            continue
        assert options[name].opts == [f"--{name.replace('_', '-')}"]
        assert options[name].help
        assert options[name].default == field.default


ASKED = {"length_scale": 0.5, "too_long": "drop", "jitter_s": 0.25, "duration_s": 9, "served_model_name": "m"}


@pytest.mark.parametrize("asked", [ASKED | {"warmup_requests": 0}, {"rate": "auto", "slo": "auto"}, {"rate": 0.5}])
def test_the_options_reach_the_plan(run_ridgeline, monkeypatch, asked):
    plans = []

    async def noted(url, plan, out, console):
        plans.append(plan)

    monkeypatch.setattr(ridgeline.cluster.commands.replay, "replay_command", noted)
    flags = [word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert run_ridgeline("replay", *flags)[0] == 0
    assert plans == [ReplayPlan(**asked)]


def test_a_replay_needs_nothing_that_draws_a_page():
    code = "import sys; sys.modules['plotly'] = None; import ridgeline.cluster.commands.replay"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE_S).returncode == 0


def _with_pools(**pools) -> RidgelineConfig:
    plain = RidgelineConfig().pools
    changed = {name: getattr(plain, name).model_copy(update=fields) for name, fields in pools.items()}
    return RidgelineConfig().model_copy(update={"pools": plain.model_copy(update=changed)})


def test_kv_caches_that_take_what_is_free_are_alike_only_if_all_do():
    free = {"gpus_per_worker": 1, "kv_cache_memory_bytes": None}
    assert equal_hardware(_with_pools(prefill=free, decode=free, colocated=free)) is None
    mixed = _with_pools(prefill=free, decode=free, colocated={"gpus_per_worker": 1})
    assert "kv_cache_memory_bytes" in equal_hardware(mixed)


ON_GPUS = {
    "prefill": {"workers": 2, "gpus_per_worker": 2},
    "decode": {"gpus_per_worker": 1},
    "colocated": {"gpus_per_worker": 1},
}


@pytest.mark.parametrize(
    ("pools", "workers"),
    [
        ({}, Workers(prefill=1, decode=1)),
        ({"colocated": {"workers": 1, "cores_per_worker": 2}}, Workers(prefill=0.5, decode=0.5)),
        (ON_GPUS, Workers(prefill=4, decode=1)),
    ],
)
def test_workers_of_the_split_are_counted_in_the_replicas_that_are_measured(pools, workers):
    assert split_workers(_with_pools(**pools), MODES) == workers
    assert split_workers(_with_pools(**pools), ("disaggregated", "colocated")) is None


@pytest.mark.parametrize(("mode", "count"), [("disaggregated", 7), ("colocated", 2), ("adaptive", 10)])
def test_the_devices_of_a_mode_are_the_cores_of_its_pools(mode, count):
    config = _with_pools(prefill={"workers": 2, "cores_per_worker": 2}, decode={"workers": 3})
    per_worker = {"prefill": 2, "decode": 1, "colocated": 1, "adaptive": 2}
    assert devices_of(config, mode) == Devices("core", count, per_worker)


def test_a_running_server_that_is_not_equal_to_an_own_mode_is_told_before_that_starts(run_ridgeline, tmp_path):
    with running(Behaviour()) as url:
        mine = ("--variants", "colocated", "--server", f"theirs={url}", "--devices", "theirs=7", "--text-prompts")
        status, _, error = run_ridgeline("compare", *mine, "--out", tmp_path)
    assert status == 1
    assert "2 in colocated, 7 in theirs" in error


def _interrupted(folder: Path, **other_versions: str) -> None:
    setup = {"configuration": RidgelineConfig().model_dump(mode="json"), "versions": versions() | other_versions}
    load = Load(rate=2.0, rate_source="as given", slo_source="the defaults")
    plan = ComparePlan(pairs=2, rate=2)
    given, settled = plan.model_dump(mode="json", exclude_unset=True), plan.model_dump(mode="json")
    RunFolder(folder).start(Settled(given, settled, load, setup, None, 1000, 1))


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--pairs=3", "pairs is 3, was 2"),
        ("--attainment=0.8", "attainment is 0.8, was the default"),
        ("--set=server.port=8123", "configuration.server.port is 8123, was 8000"),
    ],
)
def test_an_interrupted_comparison_does_not_go_on_with_another_plan_configuration_or_version(
    run_ridgeline, tmp_path, flag, told
):
    _interrupted(tmp_path / "run", vllm="0.1.0")
    status, _, error = run_ridgeline("compare", "--resume", tmp_path / "run", flag)
    assert status == 1
    for part in (told, f"versions.vllm is {versions()['vllm']}, was 0.1.0", "--out"):
        assert part in error


def test_an_interrupted_comparison_goes_on_with_its_own_plan_and_configuration(run_ridgeline, tmp_path, monkeypatch):
    gone_on = []

    async def compare_command(config, plan, out, console, past):
        gone_on.append((config.mode, plan.pairs, plan.rate, out, past.next_number))

    monkeypatch.setattr(ridgeline.cluster.commands.loadtest, "compare_command", compare_command)
    _interrupted(tmp_path / "run")
    status, _, error = run_ridgeline("compare", "--resume", tmp_path / "run", "--pairs", "2")
    assert (status, error) == (0, "")
    assert gone_on == [("disaggregated", 2, 2.0, tmp_path / "run", 0)]
