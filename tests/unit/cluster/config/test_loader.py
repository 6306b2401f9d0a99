"""The configuration: precedence, origins, and errors that say what to change."""

import io
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from ridgeline.cluster.config.loader import ConfigError, explain, load_config
from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.kv_transfer.names import MAX_GROUPS

REPOSITORY = Path(__file__).parents[4]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "some.yaml"
    path.write_text(text)
    return path


def problems_of(path: Path | None = None, **overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, {key.replace("__", "."): value for key, value in overrides.items()})
    return caught.value.problems


def only_problem_of(path: Path | None = None, **overrides: str) -> str:
    problems = problems_of(path, **overrides)
    assert len(problems) == 1, problems
    return problems[0]


def test_without_file_and_flags_every_value_is_a_default():
    loaded = load_config()
    assert loaded.config == RidgelineConfig()
    assert set(loaded.origins.values()) == {"default"}


def test_a_flag_beats_the_file_which_beats_the_default(tmp_path):
    path = write(tmp_path, "server:\n  port: 1\n  host: 0.0.0.0\n")
    loaded = load_config(path, {"server.port": "2"})
    assert (loaded.config.server.port, loaded.origins["server.port"]) == (2, "flag")
    assert (loaded.config.server.host, loaded.origins["server.host"]) == ("0.0.0.0", f"{path}:3")
    assert (loaded.config.server.drain_timeout_s, loaded.origins["server.drain_timeout_s"]) == (30.0, "default")


def test_a_partly_given_pool_keeps_the_other_defaults_of_its_role(tmp_path):
    path = write(tmp_path, "pools:\n  decode:\n    workers: 3\n")
    decode = load_config(path).config.pools.decode
    assert (decode.workers, decode.max_num_seqs) == (3, RidgelineConfig().pools.decode.max_num_seqs)


def test_an_empty_file_and_an_empty_section_keep_the_defaults(tmp_path):
    assert load_config(write(tmp_path, "")).config == RidgelineConfig()
    assert load_config(write(tmp_path, "ray:\n")).config == RidgelineConfig()


def test_an_unknown_key_names_file_line_and_nearest_key(tmp_path):
    problem = only_problem_of(write(tmp_path, "mode: colocated\npools:\n  prefill:\n    worker: 2\n"))
    assert problem.endswith("some.yaml:4: pools.prefill.worker is not a setting: did you mean pools.prefill.workers?")


def test_a_key_in_the_wrong_section_is_told_its_right_place():
    assert only_problem_of(port="80") == "flag: port is not a setting: did you mean server.port?"


def test_a_key_like_no_other_is_answered_with_what_exists():
    assert "the nearest are name, mode, fixed_mode, model" in only_problem_of(zzz="1")


def test_all_problems_are_reported_at_once(tmp_path):
    path = write(tmp_path, "server: {port: high, hots: x}\nmode: both\n")
    problems = problems_of(path, router__request_timeout_s="-1")
    assert len(problems) == 4
    assert any("some.yaml:1: server.port: input should be a valid integer" in problem for problem in problems)
    assert any("did you mean server.host?" in problem for problem in problems)
    assert any("some.yaml:2: mode: input should be 'disaggregated', 'coloc" in problem for problem in problems)
    assert any(problem.startswith("flag: router.request_timeout_s") for problem in problems)


def test_conflicts_are_reported_beside_unknown_keys():
    assert len(problems_of(zzz="1", pools__decode__max_num_batched_tokens="8")) == 2


def test_a_section_given_a_plain_value_is_an_error(tmp_path):
    assert "some.yaml:1: ray is a section" in only_problem_of(write(tmp_path, "ray: auto\n"))
    assert "server is a section: set one of server.host" in only_problem_of(server="8000")


def test_a_key_given_twice_is_an_error(tmp_path):
    assert "server.port is already set in line 2" in only_problem_of(write(tmp_path, "server:\n  port: 1\n  port: 2\n"))


def test_a_key_given_twice_is_an_error_in_a_table_too(tmp_path):
    path = write(tmp_path, "engine_args:\n  seed: 1\n  hf_overrides: {a: 1}\n  seed: 2\n")
    assert only_problem_of(path) == f"{path}:4: seed is already set in engine_args: remove one of them."
    anchors = "pools:\n  prefill:\n    resources: &r {a: 1}\n  decode:\n    resources: {<<: *r, a: 2}\n"
    assert load_config(write(tmp_path, anchors)).config.pools.decode.resources == {"a": 2.0}


@pytest.mark.parametrize("text", ["a: [", "- mode", "mode: !!python/name:os.system\n", "just text", "a: b: c"])
def test_a_file_that_is_no_configuration_is_an_error_not_a_traceback(tmp_path, text):
    assert "some.yaml" in problems_of(write(tmp_path, text))[0]


@pytest.mark.parametrize("value", ["2026-13-45", "0x_", "!!int many", "!!timestamp soon", "!!bool perhaps"])
def test_a_value_that_yaml_takes_for_a_number_or_a_date_and_is_none_is_an_error_not_a_traceback(tmp_path, value):
    path = write(tmp_path, f"mode: colocated\nname: {value}\n")
    assert only_problem_of(path).startswith(f"{path}:2: is not valid YAML: ")
    assert "quote it as in YAML" in only_problem_of(name=value)


def test_an_impossible_policy_is_an_error_with_its_origin_not_a_traceback(tmp_path):
    assert "flag: router.policy: value error, there is no policy 'none'" in only_problem_of(router__policy__name="none")
    path = write(tmp_path, "router:\n  policy:\n    options: {x: 1}\n")
    assert only_problem_of(path).startswith(f"{path}:3: router.policy: value error, policy adaptive has no options")


@pytest.mark.parametrize("plan", ["bla", "drop=2", "drop=0.1,drop=0.2", "drop=0.9,cut=0.9"])
def test_a_plan_of_faults_that_is_none_is_refused_before_an_engine_reads_it(plan):
    problem = only_problem_of(transfer__faults=plan)
    assert problem.startswith("flag: transfer.faults: value error, ")
    assert any(fix in problem for fix in ("Write it as drop=0.05,delay=0.2", "leave one out"))


def test_an_entry_of_a_table_that_is_none_is_an_error_that_names_the_table_and_no_traceback(tmp_path):
    path = write(tmp_path, "engine_args: [seed]\n")
    assert only_problem_of(path, engine_args__seed="1").startswith(
        f"{path}:1: engine_args: input should be a valid dict"
    )


def test_a_missing_file_is_an_error_that_says_so(tmp_path):
    assert "cannot be read (No such file or directory)" in only_problem_of(tmp_path / "none.yaml")


def test_bytes_are_read_as_text_with_a_unit_or_as_a_number():
    overrides = {"pools.decode.kv_cache_memory_bytes": "2 GiB", "server.max_request_bytes": "100000"}
    config = load_config(None, overrides).config
    assert type(config.pools.decode.kv_cache_memory_bytes) is int
    assert (config.pools.decode.kv_cache_memory_bytes, config.server.max_request_bytes) == (2 * 1024**3, 100_000)


def test_options_of_a_policy_and_the_pool_of_mode_adaptive_are_set_one_by_one(tmp_path):
    path = write(tmp_path, "pools:\n  adaptive: {workers: 2, max_num_seqs: 32, max_num_batched_tokens: 512}\n")
    policy = {"router.policy.name": "threshold", "router.policy.options.split_above_tokens": "256"}
    config = load_config(path, {"pools.adaptive.workers": "3", **policy}).config
    assert (config.pools.adaptive.workers, config.pools.adaptive.max_num_seqs) == (3, 32)
    assert config.router.policy.options == {"split_above_tokens": 256}


def test_resources_are_set_as_a_table_or_one_by_one(tmp_path):
    path = write(tmp_path, "pools:\n  decode:\n    resources: {slot: 1}\n")
    loaded = load_config(path, {"pools.decode.resources.ridgeline.decode": "0.5"})
    assert loaded.config.pools.decode.resources == {"slot": 1.0, "ridgeline.decode": 0.5}
    assert loaded.origins["pools.decode.resources"] == "flag"
    assert "pools.decode.resources.slot: input should be greater than 0" in only_problem_of(
        pools__decode__resources__slot="0"
    )


@pytest.mark.parametrize(
    ("path", "value", "fix"),
    [
        ("pools.decode.max_num_batched_tokens", "8", "raise it to at least 80"),
        ("pools.prefill.kv_cache_memory_bytes", "null", "set it, for instance to 1 GiB"),
        ("model.block_size", "48", "set it to 64"),
        ("model.max_model_len", "16", "lower the block size or raise the length"),
        ("pools.prefill.gpus_per_worker", "1", "set both alike"),
        ("pools.decode.tensor_parallel_size", "2", "set cores_per_worker to 2"),
        ("router.min_remote_prefill_tokens", "4096", "set it below model.max_model_len"),
        ("router.prefill_window_tokens", "600", "set it to null, which gives each pool its own, or to 1024"),
        ("router.max_queue_time_s", "601", "set it to at most router.request_timeout_s (600)"),
    ],
)
def test_an_impossible_combination_is_one_sentence_that_names_the_fix(path, value, fix):
    with pytest.raises(ConfigError) as caught:
        load_config(None, {path: value})
    assert any(fix in problem and path in problem for problem in caught.value.problems), caught.value.problems


def test_a_fetch_cannot_be_given_more_time_than_a_source_accepts():
    assert "less than or equal to 590" in only_problem_of(transfer__kv_fetch_timeout_s="601")


def test_a_fetch_cannot_be_given_more_time_than_its_request():
    problem = only_problem_of(
        transfer__kv_fetch_timeout_s="90", router__request_timeout_s="60", router__max_queue_time_s="30"
    )
    assert "transfer.kv_fetch_timeout_s (90)" in problem
    assert "set it to at most router.request_timeout_s (60)" in problem


def test_a_lease_of_milliseconds_or_of_days_is_refused():
    assert "greater than or equal to 1" in only_problem_of(transfer__lease_s="0.05")
    assert "less than or equal to 3600" in only_problem_of(transfer__lease_s="100000")


def test_what_this_mode_does_not_use_is_not_judged_unless_both_modes_will_run():
    overrides = {"pools.colocated.max_num_batched_tokens": "8", "router.prefill_window_tokens": "2048"}
    assert load_config(None, overrides).config.mode == "disaggregated"
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides, both_modes=True)
    assert ["pools.colocated.max_num_batched_tokens" in problem for problem in caught.value.problems] == [True]


@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
@pytest.mark.parametrize("file", [None, "deploy/local.yaml", "deploy/cluster-serve.yaml"])
def test_shipped_settings_keep_two_steps_of_prompts_at_every_worker_in_both_modes(file, mode):
    loaded = load_config(file and REPOSITORY / file, {"mode": mode}, both_modes=True)
    for name, pool in loaded.config.active_pools().items():
        assert loaded.config.window_tokens(name) == 2 * pool.max_num_batched_tokens


def test_a_copy_from_gpu_to_gpu_without_gpus_is_refused_and_shared_memory_named_as_the_fix():
    problem = only_problem_of(transfer__transport="cuda-ipc")
    assert "with 0 in pools.prefill.gpus_per_worker and pools.decode.gpus_per_worker all workers are on CPUs" in problem
    assert "set transfer.transport to shm" in problem
    overrides = {"transfer.transport": "cuda-ipc", **ranks_of(1, 1, gpus=True)}
    assert load_config(None, overrides).config.transfer.transport == "cuda-ipc"
    assert load_config(None, {"transfer.transport": "cuda-ipc", "mode": "colocated"}).config.mode == "colocated"


def ranks_of(prefill: int, decode: int, *, gpus: bool = False) -> dict[str, str]:
    flags = {"pools.colocated.gpus_per_worker": "1"} if gpus else {}
    for pool, ranks in (("prefill", prefill), ("decode", decode)):
        settings = ("gpus_per_worker",) if gpus else ("tensor_parallel_size", "cores_per_worker")
        flags |= {f"pools.{pool}.{setting}": str(ranks) for setting in settings}
    return flags


def adaptive(**settings) -> dict[str, str]:
    pool = {"workers": 4, "max_num_seqs": 64, "max_num_batched_tokens": 2048} | settings
    return {"mode": "adaptive", "pools.adaptive": str(pool)}


IPC = {"transfer.transport": "cuda-ipc"}
SPLIT_ON_GPUS = {"pools.prefill.gpus_per_worker": "1", "pools.decode.gpus_per_worker": "1"}


def problems_with(overrides) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return caught.value.problems


def test_mode_adaptive_is_checked_by_its_own_pool_wherever_the_others_are():
    accepted = load_config(None, {**IPC, **adaptive(gpus_per_worker=1)}).config
    assert accepted.mode == "adaptive"
    [problem] = problems_with({**IPC, **SPLIT_ON_GPUS, **adaptive(kv_cache_memory_bytes=2**30)})
    assert "with 0 in pools.adaptive.gpus_per_worker all workers are on CPUs" in problem
    [problem] = problems_with({**IPC, "mode": "adaptive"})
    assert "with 0 in pools.prefill.gpus_per_worker all workers are on CPUs" in problem
    one_on_gpus = {"pools.prefill.gpus_per_worker": "1"}
    assert load_config(None, {**one_on_gpus, **adaptive(kv_cache_memory_bytes=2**30)}).config.mode == "adaptive"
    assert "put one pool on GPUs and the other on CPUs" in problems_with(one_on_gpus)[0]


def test_ranks_that_do_not_divide_each_other_matter_to_no_mode_that_does_not_use_them():
    assert load_config(None, {**ranks_of(2, 3), **adaptive()}).config.mode == "adaptive"
    assert "do not divide each other" in problems_with(ranks_of(2, 3))[0]


def test_a_pool_for_adaptive_on_gpus_has_the_defaults_of_gpus():
    config = load_config(None, adaptive(gpus_per_worker=1)).config
    assert config.pools.for_adaptive().kv_cache_memory_bytes is None
    assert config.supervision.start_timeout_s == 3600
    assert (
        load_config(
            None, adaptive(gpus_per_worker=1, kv_cache_memory_bytes=2**33)
        ).config.pools.adaptive.kv_cache_memory_bytes
        == 2**33
    )
    assert load_config(None, adaptive()).config.pools.adaptive.kv_cache_memory_bytes == 2**30


@pytest.mark.parametrize("overrides", [{"pools.decode.workers": "20"}, adaptive(workers=20)])
def test_a_source_has_pair_groups_for_as_many_as_there_may_be(overrides):
    assert (
        load_config(None, {"transfer.transport": "collective", **overrides}).config.transfer.transport == "collective"
    )


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"pools.decode.workers": "1025"}, "1025 decode workers of 1 ranks it is 1025: set transfer.transport to grpc"),
        (adaptive(workers=1025), "or lower pools.adaptive.workers and autoscale.adaptive.max_workers"),
        (
            {
                **ranks_of(1, 2),
                "pools.decode.workers": "2",
                "autoscale.mode": "act",
                "autoscale.decode.min_workers": "1",
                "autoscale.decode.max_workers": "1000",
            },
            "with 1000 decode workers of 2 ranks it is 2000",
        ),
    ],
)
def test_more_fetching_ranks_than_a_source_can_have_pair_groups_are_refused_before_anything_starts(overrides, named):
    [problem] = problems_with({"transfer.transport": "collective", **overrides})
    assert f"collective lets at most {MAX_GROUPS} ranks fetch from a source" in problem
    assert named in problem


@pytest.mark.parametrize("gpus", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (2, 2), (4, 2), (2, 8), (3, 1)])
def test_pools_may_have_different_ranks_if_one_number_divides_the_other(prefill, decode, gpus):
    pools = load_config(None, ranks_of(prefill, decode, gpus=gpus)).config.pools
    assert (pools.prefill.ranks, pools.decode.ranks) == (prefill, decode)


@pytest.mark.parametrize("gpus", [False, True], ids=["cpu", "gpu"])
def test_ranks_that_do_not_divide_each_other_are_refused_with_the_fix(gpus):
    with pytest.raises(ConfigError) as caught:
        load_config(None, ranks_of(2, 3, gpus=gpus))
    (problem,) = caught.value.problems
    assert "pools.prefill.tensor_parallel_size (2) and pools.decode.tensor_parallel_size (3)" in problem
    assert "set one to a multiple of the other (on GPUs" in problem


def test_an_engine_is_not_split_on_a_cpu_and_has_a_rank_for_each_gpu_unless_told_otherwise():
    assert RidgelineConfig().pools.prefill.ranks == 1
    assert load_config(None, ranks_of(4, 4, gpus=True)).config.pools.decode.ranks == 4


def test_ranks_that_are_not_the_gpus_are_refused():
    problems = problems_of(**{**ranks_of(2, 2, gpus=True), "pools.decode.tensor_parallel_size": "1"})
    assert any("pools.decode.tensor_parallel_size (1) must be gpus_per_worker (2)" in problem for problem in problems)


@pytest.mark.parametrize(
    "path", ["pools.prefill.workers", "pools.decode.cores_per_worker", "transfer.lease_s", "model.path"]
)
def test_counts_and_times_cannot_be_zero_and_names_not_empty(path):
    with pytest.raises(ConfigError, match=path):
        load_config(None, {path: '""' if path == "model.path" else "0"})


def test_a_configuration_cannot_be_changed_after_loading():
    with pytest.raises(ValidationError, match="frozen"):
        load_config().config.mode = "colocated"


def test_only_the_pools_of_the_mode_are_active():
    assert list(load_config().config.active_pools()) == ["prefill", "decode"]
    assert list(load_config(None, {"mode": "colocated"}).config.active_pools()) == ["colocated"]


def test_explain_shows_every_setting_with_its_value_and_origin(tmp_path):
    loaded = load_config(write(tmp_path, "mode: colocated\n"), {"server.port": "81"})
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(explain(loaded))
    lines = console.export_text().splitlines()
    assert any("mode" in line and "colocated" in line and "some.yaml:1" in line for line in lines)
    assert any("server.port" in line and "81" in line and "flag" in line for line in lines)
    assert any(
        "kv_cache_memory_bytes" in line and "1073741824 (1,024 MiB)" in line and "default" in line for line in lines
    )
    assert sum("│" in line for line in lines) >= len(loaded.origins)


def test_every_setting_is_described():
    def undescribed(model, prefix=""):
        for name, info in model.model_fields.items():
            if hasattr(info.annotation, "model_fields"):
                yield from undescribed(info.annotation, f"{prefix}{name}.")
            elif not info.description:
                yield prefix + name

    assert list(undescribed(RidgelineConfig)) == []


def test_the_shipped_local_configuration_loads_and_gives_both_modes_the_same_cores():
    pools = load_config(REPOSITORY / "deploy/local.yaml").config.pools
    split = sum(pool.workers * pool.cores_per_worker for pool in (pools.prefill, pools.decode))
    assert split == pools.colocated.workers * pools.colocated.cores_per_worker == 2


def test_trusted_proxies_are_addresses_and_networks_and_nothing_that_trusts_everybody():
    proxies = load_config(None, {"server.trusted_proxies": "[127.0.0.1, 10.0.0.0/24, '2001:db8::/64']"})
    assert [str(network) for network in proxies.config.server.trusted_proxies] == [
        "127.0.0.1/32",
        "10.0.0.0/24",
        "2001:db8::/64",
    ]
    for written, why in {
        "['*']": "not a valid IPv4 or IPv6 network",
        "[proxy.example]": "not a valid IPv4 or IPv6 network",
        "[10.0.0.1/24]": "not a valid IPv4 or IPv6 network",
        "[0.0.0.0/0]": "names every address there is",
        "['::/0']": "names every address there is",
        "['::ffff:10.0.0.1']": "write the IPv4 address",
        "10.0.0.1": "valid tuple",
    }.items():
        assert why in only_problem_of(server__trusted_proxies=written)


@pytest.mark.parametrize("section", ["pools.prefill", "router"])
@pytest.mark.parametrize(
    ("resource", "number", "fix"),
    [
        ("CPU", "2", "cores_per_worker and gpus_per_worker of a pool"),
        ("GPU", "1", "cores_per_worker and gpus_per_worker of a pool"),
        ("slot", "1.5", "slot: Ray takes parts of one and whole numbers, not 1.5"),
    ],
)
def test_a_resource_that_ray_would_refuse_once_it_runs_is_refused_before(section, resource, number, fix):
    assert fix in only_problem_of(**{f"{section}.resources.{resource}": number})


def test_a_file_with_a_character_that_yaml_forbids_is_named_and_is_no_traceback(tmp_path):
    file = tmp_path / "control.yaml"
    file.write_text("mode: \x01")
    with pytest.raises(ConfigError, match=r"control.yaml: is not valid YAML: unacceptable character"):
        load_config(file)


# --- pools with GPUs


def test_a_pool_with_gpus_has_the_defaults_of_gpus_and_the_others_keep_theirs():
    loaded = load_config(None, {"pools.prefill.gpus_per_worker": "1", "pools.decode.gpus_per_worker": "1"})
    prefill, colocated = loaded.config.pools.prefill, loaded.config.pools.colocated
    assert (prefill.max_num_batched_tokens, prefill.kv_cache_memory_bytes) == (8192, None)
    assert (colocated.max_num_batched_tokens, colocated.kv_cache_memory_bytes) == (2048, 1024**3)
    assert loaded.config.supervision.start_timeout_s == 3600
    assert loaded.origins["pools.decode.max_num_seqs"] == "default on GPUs"
    assert loaded.origins["pools.colocated.max_num_seqs"] == "default"


SHARED_GPU = {
    **ranks_of(1, 1, gpus=True),
    "ray.share_gpus": "true",
    "engine_args.gpu_memory_utilization": "0.45",
    "pools.prefill.kv_cache_memory_bytes": "8 GiB",
    "pools.decode.kv_cache_memory_bytes": "8 GiB",
}


def test_workers_that_share_a_gpu_take_half_a_one_each():
    config = load_config(None, SHARED_GPU).config
    assert config.gpus_of(config.pools.prefill) == 0.5
    whole = load_config(None, ranks_of(2, 2, gpus=True)).config
    assert whole.gpus_of(whole.pools.prefill) == 2


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        (dict.fromkeys((f"pools.{pool}.gpus_per_worker" for pool in ("prefill", "decode")), "0"), "is 0: set it to 1"),
        (ranks_of(2, 2, gpus=True), "gpus_per_worker is 2: set it to 1"),
        ({"transfer.transport": "collective"}, "NCCL refuses them: set it to grpc or cuda-ipc"),
        ({"engine_args.gpu_memory_utilization": "0.5"}, "set engine_args.gpu_memory_utilization to 0.45"),
        ({"pools.decode.kv_cache_memory_bytes": "null"}, "ray.share_gpus needs pools.decode.kv_cache_memory_bytes"),
    ],
)
def test_a_gpu_that_cannot_be_shared_is_refused_with_the_fix(changes, fix):
    assert any(fix in problem for problem in problems_of(**SHARED_GPU | changes))


def test_a_share_of_a_gpu_that_is_not_shared_is_refused_with_the_fix():
    share = {"pools.decode.mps_active_thread_percent": "30"}
    assert load_config(None, SHARED_GPU | share).config.uses_mps()
    (problem,) = problems_of(**(ranks_of(1, 1, gpus=True) | share))
    assert problem.startswith("pools.decode.mps_active_thread_percent has an effect only on engines that share a GPU")


def test_what_is_set_beats_the_defaults_of_gpus(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "pools: {prefill: {gpus_per_worker: 1, kv_cache_memory_bytes: 8 GiB}, decode: {gpus_per_worker: 1}}"
    )
    loaded = load_config(path, {"pools.prefill.max_num_batched_tokens": "4096", "supervision.start_timeout_s": "60"})
    prefill = loaded.config.pools.prefill
    assert (prefill.kv_cache_memory_bytes, prefill.max_num_batched_tokens) == (8 * 1024**3, 4096)
    assert loaded.config.supervision.start_timeout_s == 60


@pytest.mark.parametrize("gpus", ["1.0", "'1'"])
def test_gpus_that_are_written_as_text_or_with_a_decimal_point_bring_the_defaults_of_gpus_too(gpus):
    pool = load_config(None, {"mode": "colocated", "pools.colocated.gpus_per_worker": gpus}).config.pools.colocated
    assert (pool.gpus_per_worker, pool.kv_cache_memory_bytes, pool.max_num_seqs) == (1, None, 256)


@pytest.mark.parametrize("setting", ["supervision.start_timeout_s", "server.drain_timeout_s", "autoscale.interval_s"])
@pytest.mark.parametrize("value", [".inf", ".nan"])
def test_a_time_without_end_is_refused(setting, value):
    assert "input should be a finite number" in only_problem_of(**{setting: value})


def test_a_number_of_gpus_that_is_none_is_reported_and_changes_no_default():
    with pytest.raises(ConfigError) as refused:
        load_config(None, {"pools.prefill.gpus_per_worker": "many"})
    assert len(refused.value.problems) == 1
