"""The `ridgeline` command: exit status, a sentence that names the fix, and nothing started when something is wrong."""

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
from ridgeline.cluster.errors import Unfit
from ridgeline.loadtest.plan import MODES, ComparePlan, ReplayPlan
from ridgeline.loadtest.run.calibration import Load, Workers
from ridgeline.loadtest.run_folder import RunFolder, Settled
from ridgeline.loadtest.variants import Devices
from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly
from tests.support.openai_server import Behaviour, running
from tests.support.patience import PATIENCE_S

COMMANDS = (
    "serve",
    "status",
    "stop",
    "logs",
    "doctor",
    "model",
    "roofline",
    "replay",
    "compare",
    "report",
    "bench",
    "trace",
)


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


# --- wrong input


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_is_refused_by_name(run_ridgeline, command):
    status, _, error = run_ridgeline(command, "--frobnicate")
    assert status == 2
    assert "--frobnicate" in error


def test_an_unknown_command_is_refused_by_name(run_ridgeline):
    status, _, error = run_ridgeline("sreve")
    assert status == 2
    assert "sreve" in error


@pytest.mark.parametrize("command", [["serve"], ["doctor"], ["compare", "--out", "x"]])
@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("server.port", "--set server.port: write it as section.key=value"),
        ("server.prot=1", "did you mean server.port?"),
        ("server.port=high", "server.port"),
        ("nonsense.at.all=1", "is not a setting"),
        ("pools.prefill.workers=0", "pools.prefill.workers"),
    ],
)
def test_a_wrong_setting_ends_every_command_with_a_sentence_that_names_it(run_ridgeline, command, setting, sentence):
    status, _, error = run_ridgeline(*command, "--set", setting)
    assert status == 2
    assert error.startswith("error:")
    assert sentence in error


@pytest.mark.parametrize("value", ["2", "1e3", "null", "models #1", "2026-11-28", "a: b", "\u00fcber"])
def test_a_flag_is_taken_as_it_was_typed(run_ridgeline, value):
    status, out, _ = run_ridgeline("serve", "--explain", "--model", value)
    assert status == 0
    assert (value, "flag") == re.search(r"model.path +\u2502 (.*?) +\u2502 (\w+)", out).groups()


@pytest.mark.parametrize("command", [("drain", "worker-1"), ("scale", "decode=1"), ("restart",)])
def test_time_without_end_for_a_leaving_worker_is_refused_by_its_option(run_ridgeline, command):
    status, _, error = run_ridgeline(*command, "--timeout-s", "inf")
    assert status == 2
    assert "--timeout-s" in error
    assert "a number of seconds is meant" in error


@pytest.mark.parametrize("setting", ["[/x]", "[red]server.port", "server.port=[/]", "a[b]=1"])
def test_a_setting_with_brackets_is_shown_as_it_was_typed(run_ridgeline, setting):
    status, _, error = run_ridgeline("serve", "--set", setting)
    assert status == 2
    assert setting.partition("=")[0] in error


def test_every_problem_is_told_at_once_one_a_line(run_ridgeline):
    result = CliRunner().invoke(app, ["serve", "--set", "server.prot=1", "--set", "pools.decode.workers=0"])
    assert result.exit_code == 2
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["error", "error"]


def test_a_configuration_file_that_is_not_there_is_named(run_ridgeline, tmp_path):
    status, _, error = run_ridgeline("serve", "--config", tmp_path / "none.yaml")
    assert status == 2
    assert "none.yaml" in error
    assert "name an existing YAML file" in error


# --- serve


def test_explain_shows_effective_values_and_their_origin_and_starts_nothing(run_ridgeline, tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("router:\n  max_concurrent_requests: 77\n", encoding="utf-8")
    status, shown, _ = run_ridgeline(
        "serve", "--config", file, "--port", "8123", "--prefill", "3", "--mode", "colocated", "--explain"
    )
    assert status == 0
    rows = {cells[0]: cells[1:] for line in shown.splitlines() if len(cells := line.replace("│", " ").split()) >= 3}
    assert rows["server.port"] == ["8123", "flag"]
    assert rows["pools.prefill.workers"] == ["3", "flag"]
    assert rows["mode"] == ["colocated", "flag"]
    assert rows["pools.decode.workers"] == ["1", "default"]
    assert rows["router.max_concurrent_requests"][0] == "77"
    assert "my.yaml" in "".join(shown.replace("│", " ").split()), "a long path is broken over lines"


def test_an_unfit_machine_is_told_every_fix_and_nothing_starts(run_ridgeline, monkeypatch):
    async def unfit(config, console, *, detached):
        raise Unfit("Free some memory.", "Use another port [8001].")

    monkeypatch.setattr(ridgeline.cluster.commands.serve, "serve", unfit)
    status, _, error = run_ridgeline("serve")
    assert status == 1
    assert error == "error: Free some memory. error: Use another port [8001]."


# --- doctor


def test_a_fit_machine_makes_doctor_end_with_0_and_an_unfit_one_with_1_and_the_fix(run_ridgeline, monkeypatch):
    good = CheckResult("memory", True, "1 needed, 2 available")
    bad = CheckResult("cores", False, "9 needed", "Lower workers in pools.prefill.")
    monkeypatch.setattr("ridgeline.cluster.doctor.checks.checks", lambda config: [good])
    status, shown, _ = run_ridgeline("doctor")
    assert status == 0
    assert "1 needed, 2 available" in shown
    monkeypatch.setattr("ridgeline.cluster.doctor.checks.checks", lambda config: [good, bad])
    status, shown, _ = run_ridgeline("doctor")
    assert status == 1
    assert "Lower workers in pools.prefill." in " ".join(shown.split())


def test_doctor_judges_the_configuration_it_is_given(run_ridgeline, monkeypatch):
    seen = []
    monkeypatch.setattr("ridgeline.cluster.doctor.checks.checks", lambda config: seen.append(config) or [])
    assert run_ridgeline("doctor", "--set", "pools.decode.workers=5")[0] == 0
    assert seen[0].pools.decode.workers == 5


# --- roofline


def test_roofline_prints_json_that_a_program_can_read(run_ridgeline):
    status, shown, _ = run_ridgeline("roofline", "--model", "mixtral-8x7b", "--hardware", "h100-sxm", "--json")
    assert status == 0
    told = json.loads(shown)
    assert "h100" in json.dumps(told).lower()


def test_roofline_prints_a_table_without_json(run_ridgeline):
    status, shown, _ = run_ridgeline("roofline", "--model", "mixtral-8x7b", "--hardware", "h100-sxm")
    assert status == 0
    assert "ridge" in shown.lower()
    with pytest.raises(json.JSONDecodeError):
        json.loads(shown)


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--model", "mixtral-8x7b", "--hardware", "h1000"], "h1000"),
        (["--model", "mixtral-8x7b", "--hardware", "h100-sxm", "--dtype", "bf17"], "bf17"),
        (["--model", "/no/such/model", "--hardware", "h100-sxm"], "/no/such/model"),
    ],
)
def test_roofline_names_what_it_does_not_know(run_ridgeline, args, part):
    status, _, error = run_ridgeline("roofline", *args)
    assert status == 1
    assert error.startswith("error:")
    assert part in error


# --- model


def test_a_model_that_cannot_be_prepared_is_named(run_ridgeline):
    status, _, error = run_ridgeline("model", "/no/such/model")
    assert status == 1
    assert "/no/such/model" in error


# --- replay and compare


@pytest.mark.parametrize(
    "command", [["replay", "--url", "http://127.0.0.1:9"], ["compare", "--out", "OUT"]], ids=["replay", "compare"]
)
@pytest.mark.parametrize(
    ("options", "status", "sentence"),
    [
        (["--trace", "no-such.csv"], 1, "there is no trace 'no-such.csv': give a file, 'demo',"),
        (["--trace", "poisson:rate=fast"], 1, "poisson"),
        (["--rate", "0"], 2, "rate: must be a number above 0"),
        (["--rate", "fast"], 2, "rate: must be a number above 0 or auto, not 'fast'"),
        (["--rate", "auto", "--trace", "poisson:n=1"], 1, "no spread of arrivals to rescale to a measured rate"),
        (
            ["--slo", "auto", "--slo-ttft-ms", "2000"],
            2,
            "slo auto measures TTFT and TPOT: leave out slo_ttft_ms, or slo",
        ),
        (["--limit", "0"], 2, "limit: should be greater than or equal to 1, not 0"),
        (["--jitter-s", "nan"], 2, "jitter_s: should be a finite number, not nan"),
        (["--slo-ttft-ms", "-1"], 2, "slo_ttft_ms: should be greater than 0, not -1.0"),
    ],
)
def test_a_plan_that_cannot_work_is_refused_before_anything_starts(
    run_ridgeline, tmp_path, command, options, status, sentence
):
    out = tmp_path / "out"
    found, _, error = run_ridgeline(*(out if part == "OUT" else part for part in command), *options)
    assert found == status
    assert error.startswith("error:")
    assert sentence in error
    assert not out.exists()


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


def test_compare_refuses_an_option_of_replay_that_would_do_nothing(run_ridgeline):
    status, _, error = run_ridgeline("compare", "--warmup-requests", "5")
    assert status == 2
    assert "No such option: --warmup-requests" in error


def test_the_options_reach_the_plan(run_ridgeline, monkeypatch):
    plans = []

    async def noted(url, plan, out, console):
        plans.append(plan)

    monkeypatch.setattr(ridgeline.cluster.commands.replay, "replay_command", noted)
    flags = (
        "--length-scale 0.5 --too-long drop --jitter-s 0.25 --duration-s 9 --served-model-name m --warmup-requests 0"
    )
    assert run_ridgeline("replay", *flags.split())[0] == 0
    asked = {"length_scale": 0.5, "too_long": "drop", "jitter_s": 0.25, "duration_s": 9, "served_model_name": "m"}
    assert plans == [ReplayPlan(warmup_requests=0, **asked)]
    assert run_ridgeline("replay", "--rate", "auto", "--slo", "auto")[0] == 0
    assert plans[-1] == ReplayPlan(rate="auto", slo="auto")
    assert run_ridgeline("replay", "--rate", "0.5")[0] == 0
    assert plans[-1] == ReplayPlan(rate=0.5)


def test_replay_without_a_server_says_where_it_looked(run_ridgeline):
    status, _, error = run_ridgeline(
        "replay", "--url", "http://127.0.0.1:9", "--trace", "poisson:rate=2,input=8,output=2,n=2"
    )
    assert status == 1
    assert "http://127.0.0.1:9" in error


TWO_SERVERS = ["--server", "one=http://127.0.0.1:9", "--server", "two=http://127.0.0.1:9"]
UNEQUAL = ": change pools.colocated.workers or cores_per_worker"


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--pairs=0", "pairs: should be greater than or equal to 1, not 0"),
        (
            "--served-model-name=llama",
            "--served-model-name llama: this configuration serves smollm2-135m: leave it out",
        ),
        ("--set=pools.colocated.workers=3", f"prefill and decode have 2 cores, colocated has 3{UNEQUAL}"),
        ("--set=pools.decode.cores_per_worker=2", f"prefill and decode have 3 cores, colocated has 2{UNEQUAL}"),
        (
            "--set=pools.decode.kv_cache_memory_bytes=2 GiB",
            "have 3,072 MiB together, colocated has 2,048 MiB: change kv_cache_memory_bytes",
        ),
        ("--set=ray.share_cores=true", "ray.share_cores lets engines take turns on the same cores"),
        (
            "--set=transfer.faults=seed=7,drop=0.02",
            "transfer.faults (seed=7,drop=0.02) makes fetches fail on purpose",
        ),
    ],
)
def test_compare_of_what_would_say_nothing_is_refused_with_the_fix_before_anything_starts(
    run_ridgeline, tmp_path, flag, sentence
):
    status, _, error = run_ridgeline("compare", "--out", tmp_path / "out", flag)
    assert status == 2
    assert sentence in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--server", "one=http://h:1"], "a comparison has two to 6 variants, not 1"),
        (["--server", "one=h:1"], "server: must have URLs such as vllm=http://127.0.0.1:8001, not 'h:1'"),
        ([*TWO_SERVERS, "--devices", "vllm=2"], "devices name vllm, which no server is called; servers: one, two"),
        ([*TWO_SERVERS, "--set", "server.port=8123"], "--config and --set are of an own deployment"),
    ],
)
def test_running_servers_that_cannot_be_compared_are_refused_before_they_are_asked(
    run_ridgeline, tmp_path, flags, sentence
):
    status, _, error = run_ridgeline("compare", "--out", tmp_path / "out", *flags)
    assert status == 2
    assert sentence in error
    assert error.count("error:") == 1
    assert not (tmp_path / "out").exists()


def _with_pools(pools) -> RidgelineConfig:
    plain = RidgelineConfig().pools
    changed = {name: getattr(plain, name).model_copy(update=fields) for name, fields in pools.items()}
    return RidgelineConfig().model_copy(update={"pools": plain.model_copy(update=changed)})


def test_kv_caches_that_take_what_is_free_are_alike_only_if_all_do():
    free = {"gpus_per_worker": 1, "kv_cache_memory_bytes": None}
    alike = _with_pools({"prefill": free, "decode": free, "colocated": free})
    assert equal_hardware(alike) is None
    mixed = _with_pools({"prefill": free, "decode": free, "colocated": {"gpus_per_worker": 1}})
    assert "set for some pools and null" in equal_hardware(mixed)


@pytest.mark.parametrize(
    ("pools", "workers"),
    [
        ({}, Workers(prefill=1, decode=1)),
        ({"colocated": {"workers": 1, "cores_per_worker": 2}}, Workers(prefill=0.5, decode=0.5)),
        (
            {
                "prefill": {"workers": 2, "gpus_per_worker": 2},
                "decode": {"gpus_per_worker": 1},
                "colocated": {"gpus_per_worker": 1},
            },
            Workers(prefill=4, decode=1),
        ),
    ],
)
def test_workers_of_the_split_are_counted_in_the_replicas_that_are_measured(pools, workers):
    assert split_workers(_with_pools(pools), MODES) == workers
    assert split_workers(_with_pools(pools), ("disaggregated", "colocated")) is None


def test_compare_on_an_unfit_machine_starts_nothing(run_ridgeline, tmp_path, monkeypatch):
    def unfit(config):
        raise Unfit("Free some memory.")

    monkeypatch.setattr(ridgeline.cluster.commands.own_variants, "refuse_unfit_machine", unfit)
    status, _, error = run_ridgeline("compare", "--out", tmp_path)
    assert (status, error) == (1, "error: Free some memory.")


def test_a_running_server_that_is_not_equal_to_an_own_mode_is_told_before_that_starts(run_ridgeline, tmp_path):
    with running(Behaviour()) as url:
        mine = ("--variants", "colocated", "--server", f"theirs={url}", "--devices", "theirs=7", "--text-prompts")
        status, _, error = run_ridgeline("compare", *mine, "--out", tmp_path)
    assert status == 1
    assert "Number of devices: 2 in colocated, 7 in theirs" in error


def test_compare_needs_a_folder_to_write_to(run_ridgeline):
    status, _, error = run_ridgeline("compare")
    assert status == 2
    assert "--out" in error


def test_compare_goes_on_in_one_folder_or_begins_in_one_but_not_both(run_ridgeline, tmp_path):
    status, _, error = run_ridgeline("compare", "--out", tmp_path, "--resume", tmp_path)
    assert (status, error) == (
        2,
        "error: give --out DIR for a new comparison, or --resume DIR to go on with an interrupted one",
    )
    status, _, error = run_ridgeline("compare", "--resume", tmp_path)
    assert status == 1
    assert "holds no comparison that could go on" in error


def _interrupted(folder: Path, settings: dict, **other_versions: str) -> None:
    config = RidgelineConfig()
    setup = {
        "configuration": config.model_dump(mode="json") | settings,
        "versions": versions() | other_versions,
    }
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
    _interrupted(tmp_path / "run", {}, vllm="0.1.0")
    status, _, error = run_ridgeline("compare", "--resume", tmp_path / "run", flag)
    assert status == 1
    assert told in error
    assert f"versions.vllm is {versions()['vllm']}, was 0.1.0" in error
    assert "begin anew with --out" in error


def test_an_interrupted_comparison_goes_on_with_its_own_plan_and_configuration(run_ridgeline, tmp_path, monkeypatch):
    gone_on = []

    async def compare_command(config, plan, out, console, past):
        gone_on.append((config.mode, plan.pairs, plan.rate, out, past.next_number))

    monkeypatch.setattr(ridgeline.cluster.commands.loadtest, "compare_command", compare_command)
    _interrupted(tmp_path / "run", {"mode": "disaggregated"})
    status, _, error = run_ridgeline("compare", "--resume", tmp_path / "run", "--pairs", "2")
    assert (status, error) == (0, "")
    assert gone_on == [("disaggregated", 2, 2.0, tmp_path / "run", 0)]


def test_report_names_a_folder_without_a_run(run_ridgeline, tmp_path):
    status, _, error = run_ridgeline("report", tmp_path)
    assert status == 1
    assert "holds no run: give a folder that compare has written" in error


def test_help_lists_every_command(run_ridgeline):
    status, shown, _ = run_ridgeline("--help")
    assert status == 0
    for command in COMMANDS:
        assert command in shown


@pytest.mark.parametrize("command", [["top"], ["drain", "worker-1"], ["replay"]], ids=lambda words: words[0])
@pytest.mark.parametrize(
    "url", ["http://::1:8000", "127.0.0.1:8000", "http://", "ftp://x", "http://key@x", "http://x:y"]
)
def test_what_is_no_url_of_a_server_is_told_with_how_to_write_one(run_ridgeline, command, url):
    status, _, error = run_ridgeline(*command, "--url", url)
    assert status == 2
    assert "[::1]:8000" in error


@pytest.mark.parametrize(
    ("mode", "unit", "count", "per_worker"),
    [
        ("disaggregated", "core", 7, {"prefill": 2, "decode": 1, "colocated": 1, "adaptive": 2}),
        ("colocated", "core", 2, {"prefill": 2, "decode": 1, "colocated": 1, "adaptive": 2}),
        ("adaptive", "core", 10, {"prefill": 2, "decode": 1, "colocated": 1, "adaptive": 2}),
    ],
)
def test_the_devices_of_a_mode_are_the_cores_of_its_pools(mode, unit, count, per_worker):
    plain = RidgelineConfig().pools
    prefill = plain.prefill.model_copy(update={"workers": 2, "cores_per_worker": 2})
    decode = plain.decode.model_copy(update={"workers": 3})
    pools = plain.model_copy(update={"prefill": prefill, "decode": decode})
    config = RidgelineConfig().model_copy(update={"pools": pools})
    assert devices_of(config, mode) == Devices(unit, count, per_worker)


def test_a_replay_needs_nothing_that_draws_a_page():
    code = "import sys; sys.modules['plotly'] = None; import ridgeline.cluster.commands.replay"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE_S).returncode == 0
