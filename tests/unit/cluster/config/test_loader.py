"""The configuration: precedence, origins, and errors that name the setting and what to change."""

import io
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from ridgeline.cluster.config.loader import ConfigError, explain, load_config
from ridgeline.cluster.config.models import RidgelineConfig

REPOSITORY = Path(__file__).parents[4]
GIB = 1024**3


@pytest.fixture
def write(tmp_path):
    """Write a file with this text."""

    def written(text: str) -> Path:
        path = tmp_path / "some.yaml"
        path.write_text(text)
        return path

    return written


def problems_of(path: Path | None = None, overrides=(), **options) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, dict(overrides), **options)
    return caught.value.problems


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
COLLECTIVE = {"transfer.transport": "collective"}
ON_GPUS = {f"pools.{pool}.gpus_per_worker": "1" for pool in ("prefill", "decode")}
SHARED_GPU = {
    **ranks_of(1, 1, gpus=True),
    "ray.share_gpus": "true",
    "engine_args.gpu_memory_utilization": "0.45",
    "pools.prefill.kv_cache_memory_bytes": "8 GiB",
    "pools.decode.kv_cache_memory_bytes": "8 GiB",
}
MPS = {"pools.decode.mps_active_thread_percent": "30"}
GROWS = {"autoscale.mode": "act", "autoscale.decode.min_workers": "1", "autoscale.decode.max_workers": "1000"}


# --- where values come from


def test_without_file_and_flags_every_value_is_a_default():
    loaded = load_config()
    assert loaded.config == RidgelineConfig()
    assert set(loaded.origins.values()) == {"default"}


@pytest.mark.parametrize("text", ["", "ray:\n"])
def test_an_empty_file_and_an_empty_section_keep_the_defaults(write, text):
    assert load_config(write(text)).config == RidgelineConfig()


def test_a_flag_beats_the_file_which_beats_the_default(write):
    path = write("server:\n  port: 1\n  host: 0.0.0.0\npools:\n  decode:\n    workers: 3\n")
    loaded = load_config(path, {"server.port": "2"})
    assert (loaded.config.server.port, loaded.origins["server.port"]) == (2, "flag")
    assert (loaded.config.server.host, loaded.origins["server.host"]) == ("0.0.0.0", f"{path}:3")
    assert (loaded.config.server.drain_timeout_s, loaded.origins["server.drain_timeout_s"]) == (30.0, "default")
    decode = loaded.config.pools.decode
    assert (decode.workers, decode.max_num_seqs) == (3, RidgelineConfig().pools.decode.max_num_seqs)


def test_tables_are_set_as_a_whole_or_entry_by_entry(write):
    pool = "{workers: 2, max_num_seqs: 32, max_num_batched_tokens: 512}"
    path = write(f"pools:\n  adaptive: {pool}\n  decode:\n    resources: {{slot: 1}}\n")
    entries = {
        "pools.adaptive.workers": "3",
        "pools.decode.resources.ridgeline.decode": "0.5",
        "router.policy.name": "threshold",
        "router.policy.options.split_above_tokens": "256",
    }
    loaded = load_config(path, entries)
    pools = loaded.config.pools
    assert (pools.adaptive.workers, pools.adaptive.max_num_seqs) == (3, 32)
    assert pools.decode.resources == {"slot": 1.0, "ridgeline.decode": 0.5}
    assert loaded.origins["pools.decode.resources"] == "flag"
    assert loaded.config.router.policy.options == {"split_above_tokens": 256}


@pytest.mark.parametrize(("decode", "adaptive"), [("{a: 1}", {"a": 1.0}), ("{b: 1}", {}), ("{}", {})])
def test_a_worker_that_does_both_is_bound_to_the_machines_of_a_pool_only_if_both_pools_are(decode, adaptive):
    config = load_config(None, {"pools.prefill.resources": "{a: 1}", "pools.decode.resources": decode}).config
    assert config.pools.for_adaptive().resources == adaptive


def test_a_table_may_be_merged_with_what_is_set_in_it_again(write):
    anchors = "pools:\n  prefill:\n    resources: &r {a: 1}\n  decode:\n    resources: {<<: *r, a: 2}\n"
    assert load_config(write(anchors)).config.pools.decode.resources == {"a": 2.0}


def test_bytes_are_read_as_text_with_a_unit_or_as_a_number():
    overrides = {"pools.decode.kv_cache_memory_bytes": "2 GiB", "server.max_request_bytes": "100000"}
    config = load_config(None, overrides).config
    assert (config.pools.decode.kv_cache_memory_bytes, config.server.max_request_bytes) == (2 * GIB, 100_000)


def test_explain_shows_every_setting_with_its_value_and_origin(write):
    loaded = load_config(write("mode: colocated\n"), {"server.port": "81"})
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(explain(loaded))
    lines = console.export_text().splitlines()
    for parts in (
        ("mode", "colocated", "some.yaml:1"),
        ("server.port", "81", "flag"),
        ("kv_cache_memory_bytes", "1073741824 (1,024 MiB)", "default"),
    ):
        assert any(all(part in line for part in parts) for line in lines)
    assert sum("│" in line for line in lines) >= len(loaded.origins)


# --- what is no configuration


@pytest.mark.parametrize(
    ("text", "overrides", "parts"),
    [
        pytest.param(
            "mode: colocated\npools:\n  prefill:\n    worker: 2\n",
            {},
            ["some.yaml:4: pools.prefill.worker ", "did you mean pools.prefill.workers?"],
            id="unknown_key",
        ),
        pytest.param("", {"port": "80"}, ["flag: port ", "did you mean server.port?"], id="wrong_section"),
        pytest.param("", {"zzz": "1"}, ["flag: zzz ", "name, mode, fixed_mode, model"], id="like_no_other"),
        pytest.param("config: {mode: adaptive}\n", {}, ["some.yaml:1: config ", "Helm", "under it"], id="helm_values"),
        pytest.param("ray: auto\n", {}, ["some.yaml:1: ray is a section"], id="section_as_value"),
        pytest.param("", {"server": "8000"}, ["server is a section", "server.host"], id="section_as_flag"),
        pytest.param("server:\n  port: 1\n  port: 2\n", {}, ["some.yaml:3: server.port", "line 2"], id="given_twice"),
        pytest.param(
            "engine_args:\n  seed: 1\n  hf_overrides: {a: 1}\n  seed: 2\n",
            {},
            [":4: engine_args.seed", "line 2"],
            id="twice_in_table",
        ),
        pytest.param("a: [", {}, ["some.yaml"], id="no_yaml"),
        pytest.param("- mode", {}, ["some.yaml:1"], id="list"),
        pytest.param("mode: !!python/name:os.system\n", {}, ["some.yaml:1"], id="tag"),
        pytest.param("just text", {}, ["some.yaml:1"], id="text"),
        pytest.param("a: b: c", {}, ["some.yaml:1"], id="colons"),
        pytest.param("mode: \x01", {}, ["some.yaml: "], id="forbidden_character"),
        pytest.param("engine_args: [seed]\n", {"engine_args.seed": "1"}, [":1: engine_args"], id="table_that_is_none"),
        pytest.param(
            "router:\n  policy:\n    options: {x: 1}\n", {}, [":3: router.policy", "adaptive"], id="options_of_a_policy"
        ),
        pytest.param("", {"router.policy.name": "none"}, ["flag: router.policy", "'none'"], id="policy"),
        *(
            pytest.param("", {"transfer.faults": plan}, ["flag: transfer.faults"], id=plan)
            for plan in ("bla", "drop=2", "drop=0.1,drop=0.2", "drop=0.9,cut=0.9")
        ),
        *(
            pytest.param(f"mode: colocated\nname: {value}\n", {}, ["some.yaml:2: "], id=value)
            for value in ("2026-13-45", "0x_", "!!int many", "!!timestamp soon", "!!bool perhaps")
        ),
        pytest.param("", {"name": "2026-13-45"}, ["flag: name", "quote"], id="no_date_in_a_flag"),
        pytest.param("", {"pools.prefill.gpus_per_worker": "many"}, ["pools.prefill.gpus_per_worker"], id="no_number"),
    ],
)
def test_what_is_no_configuration_is_one_sentence_with_its_place(write, text, overrides, parts):
    [problem] = problems_of(write(text), overrides)
    assert all(part in problem for part in parts), problem


def test_a_missing_file_is_named(tmp_path):
    [problem] = problems_of(tmp_path / "none.yaml")
    assert "none.yaml" in problem
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    assert "UTF-8" in problems_of(tmp_path / "binary.yaml")[0]


def test_all_problems_are_reported_at_once(write):
    path = write("server: {port: high, hots: x}\nmode: both\n")
    problems = problems_of(path, {"router.request_timeout_s": "-1"})
    starts = ("some.yaml:1: server.port", "did you mean server.host?", "some.yaml:2: mode", "flag: router.request_tim")
    assert len(problems) == 4
    assert all(any(start in problem for problem in problems) for start in starts)
    assert len(problems_of(None, {"zzz": "1", "pools.decode.max_num_batched_tokens": "8"})) == 2


# --- values that cannot be


@pytest.mark.parametrize(
    ("setting", "value", "parts"),
    [
        *((f"pools.{pool}.resources.slot", "0", ["greater than 0"]) for pool in ("prefill", "decode")),
        *(
            (f"{section}.resources.{resource}", number, [part])
            for section in ("pools.prefill", "router")
            for resource, number, part in (
                ("CPU", "2", "cores_per_worker"),
                ("GPU", "1", "gpus_per_worker"),
                ("memory", "64e9", "cores_per_worker"),
                ("slot", "1.5", "slot"),
            )
        ),
        ("pools.prefill.workers", "0", []),
        ("pools.decode.cores_per_worker", "0", []),
        ("model.path", '""', []),
        ("transfer.kv_fetch_timeout_s", "601", ["590"]),
        ("transfer.lease_s", "0.05", ["1"]),
        ("transfer.lease_s", "100000", ["3600"]),
        *(
            (f"{name}_s", v, [])
            for name in ("supervision.start_timeout", "autoscale.interval")
            for v in (".inf", ".nan")
        ),
        ("server.trusted_proxies", "['*']", []),
        ("server.trusted_proxies", "[proxy.example]", []),
        ("server.trusted_proxies", "[10.0.0.1/24]", []),
        ("server.trusted_proxies", "[0.0.0.0/0]", ["every address"]),
        ("server.trusted_proxies", "['::/0']", ["every address"]),
        ("server.trusted_proxies", "['::ffff:10.0.0.1']", ["IPv4 address"]),
        ("server.trusted_proxies", "10.0.0.1", ["tuple"]),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_setting(setting, value, parts):
    [problem] = problems_of(None, {setting: value})
    assert all(part in problem for part in (setting.partition(".resources")[0], *parts)), problem


def test_trusted_proxies_are_addresses_and_networks():
    proxies = load_config(None, {"server.trusted_proxies": "[127.0.0.1, 10.0.0.0/24, '2001:db8::/64']"})
    networks = [str(network) for network in proxies.config.server.trusted_proxies]
    assert networks == ["127.0.0.1/32", "10.0.0.0/24", "2001:db8::/64"]


# --- impossible together


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"pools.decode.max_num_batched_tokens": "8"}, ["pools.decode.max_num_batched_tokens", "80"]),
        ({"pools.prefill.kv_cache_memory_bytes": "null"}, ["pools.prefill.kv_cache_memory_bytes", "1 GiB"]),
        ({"model.block_size": "48"}, ["model.block_size", "64"]),
        ({"model.max_model_len": "16"}, ["model.max_model_len", "model.block_size"]),
        ({"pools.prefill.gpus_per_worker": "1"}, ["pools.prefill.gpus_per_worker", "pools.decode.gpus_per_worker"]),
        ({"pools.decode.tensor_parallel_size": "2"}, ["pools.decode.tensor_parallel_size", "cores_per_worker to 2"]),
        ({"router.min_remote_prefill_tokens": "4096"}, ["router.min_remote_prefill_tokens", "model.max_model_len"]),
        ({"router.prefill_window_tokens": "600"}, ["router.prefill_window_tokens", "1024"]),
        ({"router.max_queue_time_s": "601"}, ["router.max_queue_time_s", "router.request_timeout_s (600)"]),
        (
            {
                "transfer.kv_fetch_timeout_s": "90",
                "router.request_timeout_s": "60",
                "router.max_queue_time_s": "30",
            },
            ["transfer.kv_fetch_timeout_s (90)", "router.request_timeout_s (60)"],
        ),
        (IPC, ["pools.prefill.gpus_per_worker and pools.decode.gpus_per_worker", "transfer.transport to shm"]),
        (IPC | ON_GPUS | adaptive(kv_cache_memory_bytes=GIB), ["pools.adaptive.gpus_per_worker"]),
        (IPC | {"mode": "adaptive"}, ["pools.prefill.gpus_per_worker"]),
        (ranks_of(2, 3), ["pools.prefill.tensor_parallel_size (2)", "pools.decode.tensor_parallel_size (3)"]),
        (ranks_of(2, 3, gpus=True), ["pools.prefill.tensor_parallel_size (2)", "gpus_per_worker"]),
        (
            ranks_of(2, 2, gpus=True) | {"pools.decode.tensor_parallel_size": "1"},
            ["pools.decode.tensor_parallel_size (1)", "gpus_per_worker (2)"],
        ),
        (COLLECTIVE | {"pools.decode.workers": "1025"}, ["1025", "transfer.transport to grpc"]),
        (COLLECTIVE | adaptive(workers=1025), ["pools.adaptive.workers", "autoscale.adaptive.max_workers"]),
        (COLLECTIVE | GROWS | ranks_of(1, 2), ["1000", "2000"]),
        (SHARED_GPU | dict.fromkeys(ON_GPUS, "0"), ["gpus_per_worker is 0"]),
        (SHARED_GPU | ranks_of(2, 2, gpus=True), ["gpus_per_worker is 2"]),
        (SHARED_GPU | COLLECTIVE, ["transfer.transport", "grpc or cuda-ipc"]),
        (SHARED_GPU | {"engine_args.gpu_memory_utilization": "0.5"}, ["engine_args.gpu_memory_utilization to 0.45"]),
        (
            SHARED_GPU | {"pools.decode.kv_cache_memory_bytes": "null"},
            ["ray.share_gpus needs pools.decode.kv_cache_memory_bytes"],
        ),
        (ranks_of(1, 1, gpus=True) | MPS, ["pools.decode.mps_active_thread_percent", "ray.share_gpus"]),
    ],
    ids=str,
)
def test_an_impossible_combination_is_one_sentence_that_names_the_fix(overrides, parts):
    problems = problems_of(None, overrides)
    assert any(all(part in problem for part in parts) for problem in problems), problems


@pytest.mark.parametrize(
    "overrides",
    [
        IPC | ranks_of(1, 1, gpus=True),
        IPC | {"mode": "colocated"},
        IPC | adaptive(gpus_per_worker=1),
        {"pools.prefill.gpus_per_worker": "1"} | adaptive(kv_cache_memory_bytes=GIB),
        ranks_of(2, 3) | adaptive(),
        COLLECTIVE | {"pools.decode.workers": "20"},
        COLLECTIVE | adaptive(workers=20),
        *(
            ranks_of(*ranks, gpus=gpus)
            for gpus in (False, True)
            for ranks in ((2, 1), (1, 2), (2, 2), (4, 2), (2, 8), (3, 1))
        ),
        SHARED_GPU | MPS,
    ],
    ids=str,
)
def test_what_is_possible_together_is_accepted(overrides):
    load_config(None, overrides)


def test_what_this_mode_does_not_use_is_not_judged_unless_both_modes_will_run():
    overrides = {"pools.colocated.max_num_batched_tokens": "8", "router.prefill_window_tokens": "2048"}
    assert load_config(None, overrides).config.mode == "disaggregated"
    problems = problems_of(None, overrides, both_modes=True)
    assert ["pools.colocated.max_num_batched_tokens" in problem for problem in problems] == [True]


# --- what settings mean


def test_the_pools_of_a_mode_and_the_ranks_and_gpus_of_a_worker():
    assert list(load_config().config.active_pools()) == ["prefill", "decode"]
    assert list(load_config(None, {"mode": "colocated"}).config.active_pools()) == ["colocated"]
    assert RidgelineConfig().pools.prefill.ranks == 1
    for overrides, ranks, gpus in ((ranks_of(4, 4, gpus=True), 4, 4), (SHARED_GPU, 1, 0.5)):
        config = load_config(None, overrides).config
        assert (config.pools.prefill.ranks, config.gpus_of(config.pools.prefill)) == (ranks, gpus)
        assert not config.uses_mps()
    assert load_config(None, SHARED_GPU | MPS).config.uses_mps()


@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
@pytest.mark.parametrize("file", [None, "deploy/local.yaml", "deploy/cluster-serve.yaml"])
def test_shipped_settings_keep_two_steps_of_prompts_at_every_worker_in_both_modes(file, mode):
    loaded = load_config(file and REPOSITORY / file, {"mode": mode}, both_modes=True)
    for name, pool in loaded.config.active_pools().items():
        assert loaded.config.window_tokens(name) == 2 * pool.max_num_batched_tokens


def test_the_shipped_local_configuration_gives_both_modes_the_same_cores():
    pools = load_config(REPOSITORY / "deploy/local.yaml").config.pools
    split = sum(pool.workers * pool.cores_per_worker for pool in (pools.prefill, pools.decode))
    assert split == pools.colocated.workers * pools.colocated.cores_per_worker == 2


def test_a_configuration_cannot_be_changed_after_loading():
    with pytest.raises(ValidationError, match="frozen"):
        load_config().config.mode = "colocated"


def test_every_setting_is_described():
    def undescribed(model, prefix=""):
        for name, info in model.model_fields.items():
            if hasattr(info.annotation, "model_fields"):
                yield from undescribed(info.annotation, f"{prefix}{name}.")
            elif not info.description:
                yield prefix + name

    assert list(undescribed(RidgelineConfig)) == []


# --- pools with GPUs


def test_a_pool_with_gpus_has_the_defaults_of_gpus_and_the_others_keep_theirs():
    loaded = load_config(None, ON_GPUS)
    prefill, colocated = loaded.config.pools.prefill, loaded.config.pools.colocated
    assert (prefill.max_num_batched_tokens, prefill.kv_cache_memory_bytes) == (8192, None)
    assert (colocated.max_num_batched_tokens, colocated.kv_cache_memory_bytes) == (2048, GIB)
    assert loaded.config.supervision.start_timeout_s == 3600
    assert loaded.origins["pools.decode.max_num_seqs"] == "default on GPUs"
    assert loaded.origins["pools.colocated.max_num_seqs"] == "default"


def test_what_is_set_beats_the_defaults_of_gpus(write):
    prefill = "{gpus_per_worker: 1, kv_cache_memory_bytes: 8 GiB}"
    path = write(f"pools: {{prefill: {prefill}, decode: {{gpus_per_worker: 1}}}}")
    config = load_config(
        path, {"pools.prefill.max_num_batched_tokens": "4096", "supervision.start_timeout_s": "60"}
    ).config
    prefill = config.pools.prefill
    assert (prefill.kv_cache_memory_bytes, prefill.max_num_batched_tokens) == (8 * GIB, 4096)
    assert config.supervision.start_timeout_s == 60


@pytest.mark.parametrize("gpus", ["1.0", "'1'"])
def test_gpus_that_are_written_as_text_or_with_a_decimal_point_bring_the_defaults_of_gpus_too(gpus):
    pool = load_config(None, {"mode": "colocated", "pools.colocated.gpus_per_worker": gpus}).config.pools.colocated
    assert (pool.gpus_per_worker, pool.kv_cache_memory_bytes, pool.max_num_seqs) == (1, None, 256)


@pytest.mark.parametrize(
    ("settings", "cache_bytes", "start_timeout_s"),
    [
        ({"gpus_per_worker": 1}, None, 3600),
        ({"gpus_per_worker": 1, "kv_cache_memory_bytes": 8 * GIB}, 8 * GIB, 3600),
        ({}, GIB, 900),
    ],
)
def test_a_pool_for_adaptive_on_gpus_has_the_defaults_of_gpus(settings, cache_bytes, start_timeout_s):
    config = load_config(None, adaptive(**settings)).config
    assert config.pools.for_adaptive().kv_cache_memory_bytes == cache_bytes
    assert config.supervision.start_timeout_s == start_timeout_s
