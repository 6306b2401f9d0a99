"""What will run where: cores, and the settings made from the one configuration."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.cluster.config.loader import ConfigError, load_config
from ridgeline.cluster.config.models import PoolConfig
from ridgeline.cluster.model_store import ModelError
from ridgeline.cluster.runtime import plan as plan_module
from ridgeline.cluster.runtime.actors import NodePlace
from ridgeline.cluster.runtime.handles.routing import RoutingHandle
from ridgeline.cluster.runtime.handles.worker import worker_environment
from ridgeline.cluster.runtime.plan import (
    CoreTable,
    PlacementError,
    PlannedWorker,
    dtype_of_nodes,
    make_plan,
    routers_for,
)
from ridgeline.cluster.runtime.processes import ProcessId
from ridgeline.cluster.runtime.roles import KEPT
from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly
from tests.support.symptoms import is_quoted


def a_worker(name="worker-0", cores=1, gpus=0, pool="decode"):
    settings = PoolConfig(
        workers=1, cores_per_worker=cores, gpus_per_worker=gpus, max_num_seqs=8, max_num_batched_tokens=64
    )
    return PlannedWorker(name, pool, settings, f"pools.{pool}")


def assign_cores(workers, places, **options):
    table = CoreTable(**options)
    return [table.take(worker, place) for worker, place in zip(workers, places, strict=True)]


def a_place(node="n1", cores=(0, 1, 2, 3), machine=None):
    """A place on a machine of its own, unless one is given."""
    return NodePlace(node, f"host-{node}", tuple(cores), ProcessId(1, 0.0), machine or f"machine of {node}")


@pytest.mark.parametrize(
    ("flags", "settings", "dtype"),
    [
        (({"avx512_bf16"}, {"avx512_bf16", "amx_bf16"}), {}, "bfloat16"),
        (({"avx2"}, {"avx512f"}), {}, "float32"),
        (({"avx2"}, {"avx512_bf16"}), {"model.dtype": "float32"}, "float32"),
        (({"avx512_bf16"}, {"avx2"}), {}, None),
    ],
)
def test_the_number_format_is_that_of_all_workers_machines_and_not_that_of_serve(flags, settings, dtype):
    places = {f"worker-{n}": replace(a_place(f"n{n}"), cpu_flags=frozenset(each)) for n, each in enumerate(flags)}
    config = load_config(None, settings).config
    if dtype is not None:
        assert dtype_of_nodes(config, places) == dtype
        return
    with pytest.raises(PlacementError, match=r"bfloat16 for worker-0 on host-n0, float32 for worker-1 on host-n1"):
        dtype_of_nodes(config, places)


@given(
    wanted=st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["n1", "n2"])), min_size=1, max_size=6),
    cores=st.lists(st.integers(0, 63), min_size=18, max_size=18, unique=True),
)
@settings(max_examples=50)
def test_workers_of_one_node_get_disjoint_cores_of_that_node(wanted, cores):
    workers = tuple(a_worker(f"worker-{index}", count) for index, (count, _) in enumerate(wanted))
    assigned = assign_cores(workers, [a_place(node, cores) for _, node in wanted])
    assert [len(mine) for mine in assigned] == [count for count, _ in wanted]
    for node in ("n1", "n2"):
        taken = [core for mine, (_, place) in zip(assigned, wanted, strict=True) if place == node for core in mine]
        assert len(taken) == len(set(taken))
        assert set(taken) <= set(cores)


def beside(place, *taken):
    """A place where other workers seem to have these cores."""
    return replace(place, taken=frozenset(taken))


ON_M = [a_place(node, (4, 5), "m") for node in ("n1", "n2")]


@pytest.mark.parametrize(
    ("workers", "places", "cores"),
    [
        pytest.param(
            [(2, 0), (2, 0)], [a_place("n1", (4, 5)), a_place("n2", (4, 5))], [(4, 5), (4, 5)], id="two_nodes"
        ),
        pytest.param([(1, 0), (1, 0)], ON_M, [(4,), (5,)], id="two_nodes_of_one_machine"),
        pytest.param([(1, 0)], [beside(a_place(cores=(0, 1, 2)), 0, 2)], [(1,)], id="beside_another_deployment"),
        pytest.param([(2, 1), (2, 0)], [a_place(cores=(0, 1))] * 2, [(), (0, 1)], id="a_gpu_worker_takes_none"),
    ],
)
def test_cores_are_those_that_no_other_worker_of_the_machine_has(workers, places, cores):
    named = [a_worker(f"worker-{n}", count, gpus) for n, (count, gpus) in enumerate(workers)]
    assert assign_cores(named, places) == cores


@pytest.mark.parametrize(
    ("workers", "places", "parts"),
    [
        pytest.param([3, 2], [a_place()] * 2, ["worker-1 (decode)", "pools.decode.workers"], id="on_one_node"),
        pytest.param([1, 1, 1], [*ON_M, ON_M[1]], ["worker-2", "host-n2"], id="on_one_machine"),
        pytest.param([2], [beside(a_place(cores=(0, 1, 2)), 0, 2)], ["1 are left"], id="beside_another_deployment"),
    ],
)
def test_too_few_cores_is_a_sentence_that_names_worker_node_and_setting(workers, places, parts):
    with pytest.raises(PlacementError) as refused:
        assign_cores([a_worker(f"worker-{n}", count) for n, count in enumerate(workers)], places)
    assert all(part in str(refused.value) for part in parts), refused.value


def test_the_sentence_about_another_deployment_is_in_the_guide():
    with pytest.raises(PlacementError) as refused:
        assign_cores([a_worker(cores=2)], [beside(a_place(cores=(0, 1, 2)), 0, 2)])
    assert is_quoted(str(refused.value))


def test_a_worker_of_a_pool_without_a_section_of_its_own_is_told_of_the_one_that_it_is_set_in(planned):
    with pytest.raises(PlacementError, match=r"pools.prefill.workers"):
        CoreTable().take(planned(mode="adaptive").workers[0], a_place(cores=()))


def test_a_worker_that_is_back_on_its_machine_gets_its_cores_again_and_on_another_free_ones():
    table, first, second = CoreTable(), a_worker("worker-0"), a_worker("worker-1")
    assert [table.take(first, a_place()), table.take(second, a_place())] == [(0,), (1,)]
    assert table.take(first, beside(a_place("again", machine="machine of n1"), 0)) == (0,), "it seems to have it itself"
    assert table.take(first, a_place("n2", (8, 9))) == (8,)
    assert table.take(first, a_place("n3", (6, 7), "machine of n2")) == (6,), "it may not run on 8 there"
    assert table.take(a_worker("worker-2"), a_place()) == (0,), "what it left is free"
    table.give_back("worker-1")
    assert table.take(a_worker("worker-3"), a_place()) == (1,)


def test_shared_cores_go_round():
    workers = tuple(a_worker(f"worker-{index}") for index in range(5))
    assert assign_cores(workers, [a_place(cores=(4, 5))] * 5, share=True) == [(4,), (5,), (4,), (5,), (4,)]
    with pytest.raises(PlacementError):
        assign_cores((a_worker("worker-0", 3),), [a_place(cores=(4, 5))], share=True)


@pytest.fixture
def planned(monkeypatch, tmp_path):
    """A plan made without a model: {setting: value} on top of the defaults."""
    monkeypatch.setattr(plan_module, "prepare_model", lambda path: tmp_path)
    return lambda **settings: make_plan(
        load_config(None, {k.replace("__", "."): v for k, v in settings.items()}).config
    )


def test_every_worker_of_the_mode_is_planned_and_no_other(planned):
    split, whole = planned(pools__prefill__workers="2"), planned(mode="colocated")
    titles = ["worker-0 (prefill)", "worker-1 (prefill)", "worker-2 (decode)"]
    assert [worker.title for worker in split.workers] == titles
    assert planned(pools__prefill__workers="2").workers == split.workers, "the same ids at every start"
    assert [worker.title for worker in whole.workers] == ["worker-0 (colocated)", "worker-1 (colocated)"]


def test_an_engine_gets_its_own_pools_limits_and_the_shared_ones(planned, tmp_path):
    plan = planned(
        pools__prefill__max_num_batched_tokens="1000",
        pools__decode__kv_cache_memory_bytes="64 MiB",
        model__max_model_len="512",
        model__dtype="float32",
        transfer__lease_s="7",
    )
    prefill, decode = (plan.engine_config(worker, "10.0.0.1") for worker in plan.workers)
    assert (prefill.worker_id, prefill.pool, prefill.max_num_batched_tokens) == ("worker-0", "prefill", 1000)
    assert (decode.worker_id, decode.pool, decode.kv_cache_bytes_per_rank) == ("worker-1", "decode", 64 * 1024**2)
    for engine in (prefill, decode):
        assert (engine.max_model_len, engine.block_size, engine.dtype) == (512, 32, "float32")
        assert engine.transfer.transport == "auto"
        assert (engine.transfer.lease_s, engine.transfer.host, engine.model_path) == (7.0, "10.0.0.1", str(tmp_path))
        assert (engine.on_cpu, engine.enforce_eager, engine.tensor_parallel_size) == (True, True, 1)


@pytest.mark.parametrize(
    ("asked", "on_cpu", "on_gpu"), [("null", True, False), ("true", True, True), ("false", False, False)]
)
def test_engines_compile_on_gpus_unless_asked_not_to_and_on_cpus_only_if_asked_to(planned, asked, on_cpu, on_gpu):
    plan = planned(model__enforce_eager=asked)
    assert plan.config.model.is_eager(on_cpu=False) is on_gpu
    for worker in plan.workers:
        assert plan.engine_config(worker, "10.0.0.1").enforce_eager is on_cpu
        assert ("TORCH_COMPILE_DISABLE" in worker_environment(worker.settings, plan.config)) is on_cpu


def test_workers_have_a_role_in_every_mode_and_engines_that_hold_the_larger_limits(planned):
    limits = {"pools__decode__max_num_seqs": "90", "pools__colocated__max_num_batched_tokens": "900"}
    for mode in ("disaggregated", "colocated", "adaptive"):
        plan = planned(mode=mode, **limits)
        settings = plan.router_settings()
        assert {
            other: {name: (role.pool, role.max_num_seqs, role.max_num_batched_tokens) for name, role in roles.items()}
            for other, roles in settings.roles.items()
        } == {
            "disaggregated": {"worker-0": ("prefill", 32, 512), "worker-1": ("decode", 90, 512)},
            "colocated": {"worker-0": ("colocated", 72, 900), "worker-1": ("colocated", 72, 900)},
            "adaptive": {"worker-0": ("adaptive", 90, 602), "worker-1": ("adaptive", 90, 602)},
        }
        for worker in plan.workers:
            engine = plan.engine_config(worker, "10.0.0.1")
            assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.hands_over) == (90, 900, True)


@pytest.mark.parametrize(
    ("mode", "section", "speculates"),
    [
        ("disaggregated", "pools__decode__engine_args", True),
        ("colocated", "pools__decode__engine_args", False),
        ("adaptive", "pools__decode__engine_args", False),
        ("colocated", "engine_args", True),
    ],
)
def test_fields_that_drafts_lack_are_refused_only_where_a_pool_of_this_mode_drafts(planned, mode, section, speculates):
    drafts = {section: '{"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}'}
    assert planned(mode=mode, **drafts).router_settings().speculates is speculates


def test_a_step_target_is_in_the_role_of_each_mode_and_in_the_engine_until_it_has_one(planned):
    plan = planned(mode="disaggregated", pools__decode__itl_target_ms="90", pools__colocated__itl_target_ms="120")
    assert {
        mode: [role.step_target_s for role in roles.values()] for mode, roles in plan.router_settings().roles.items()
    } == {"disaggregated": [0.0, 0.09], "colocated": [0.12, 0.12], "adaptive": [0.0, 0.0]}
    assert [plan.engine_config(worker, "10.0.0.1").step_target_s for worker in plan.workers] == [0.0, 0.09]


@pytest.mark.parametrize(
    ("settings", "mode", "why"),
    [
        ({"fixed_mode": "true"}, "colocated", "fixed_mode"),
        ({"pools__prefill__workers": "2"}, "colocated", "are 3 together, pools.colocated.workers is 2"),
        ({"pools__decode__kv_cache_memory_bytes": "64 MiB"}, "colocated", "pools.decode.kv_cache_memory_bytes"),
        ({"pools__decode__kv_cache_memory_bytes": "64 MiB"}, "adaptive", "pools.decode.kv_cache_memory_bytes"),
        ({"pools__colocated__engine_args": "{seed: 3}"}, "colocated", "engine_args"),
        ({"pools__colocated__max_num_batched_tokens": "8"}, "colocated", "max_num_seqs"),
        (
            {"mode": "adaptive", "pools__colocated__workers": "3"},
            "colocated",
            "pools.prefill.workers and pools.decode.workers are 2 together",
        ),
        (
            {"pools__adaptive": "{workers: 3, max_num_seqs: 8, max_num_batched_tokens: 64}"},
            "adaptive",
            "pools.adaptive.workers is 3",
        ),
        ({"mode": "colocated", "model__path": "somebody/some-model"}, "disaggregated", "somebody/some-model"),
    ],
)
def test_a_deployment_that_cannot_change_its_mode_says_which_setting_is_in_the_way(planned, settings, mode, why):
    router = planned(**settings).router_settings()
    assert mode not in router.roles
    assert why in router.why_not[mode]


@pytest.mark.parametrize(
    ("settings", "modes", "hands_over"),
    [
        ({"pools__decode__kv_cache_memory_bytes": "64 MiB"}, set(), True),
        ({"pools__prefill__workers": "2"}, {"disaggregated", "adaptive"}, True),
        ({"model__path": "somebody/some-model"}, {"disaggregated", "adaptive", "colocated"}, True),
        ({"mode": "colocated", "model__path": "somebody/some-model"}, set(), False),
        ({"mode": "colocated", "fixed_mode": "true"}, set(), False),
    ],
)
def test_engines_hand_over_if_a_mode_of_the_deployment_does(planned, settings, modes, hands_over):
    plan = planned(**settings)
    assert {*plan.router_settings().roles} == modes
    assert {plan.engine_config(worker, "h").hands_over for worker in plan.workers} == {hands_over}


def test_every_setting_of_a_pool_is_kept_by_a_running_engine_or_set_at_run_time_or_only_places_it():
    set_at_run_time = {"workers", "max_num_seqs", "max_num_batched_tokens", "itl_target_ms"}
    assert {*KEPT, "resources"} | set_at_run_time == {*PoolConfig.model_fields}


def test_the_ranks_of_an_engine_share_its_cache(planned):
    plan = planned(
        model__path="/somewhere",
        pools__prefill__tensor_parallel_size="2",
        pools__prefill__cores_per_worker="4",
        pools__prefill__kv_cache_memory_bytes="64 MiB",
    )
    prefill, decode = (plan.engine_config(worker, "10.0.0.1") for worker in plan.workers)
    assert (prefill.tensor_parallel_size, prefill.kv_cache_bytes_per_rank) == (2, 32 * 1024**2)
    assert decode.tensor_parallel_size == 1


def test_heads_that_cannot_be_split_are_refused_before_the_model_is_prepared(planned, monkeypatch):
    monkeypatch.setattr(plan_module, "prepare_model", lambda path: pytest.fail("too late"))
    with pytest.raises(ModelError, match="tensor_parallel_size"):
        planned(pools__decode__tensor_parallel_size="2", pools__decode__cores_per_worker="2")


def test_a_configured_transfer_interface_beats_the_nodes_address_and_each_start_is_another_incarnation(planned):
    plan = planned(transfer__host="192.168.0.9")
    starts = [plan.engine_config(plan.workers[0], "10.0.0.1") for _ in range(5)]
    assert {one.transfer.host for one in starts} == {"192.168.0.9"}
    assert len({one.incarnation for one in starts}) == 5


def test_the_router_is_told_its_limits_and_the_name_clients_use(planned):
    router = planned(
        model__served_model_name="[mine, another]",
        server__port="1234",
        router__min_remote_prefill_tokens="99",
        router__max_concurrent_requests="5",
        router__prefill_window_tokens="3000",
        router__slo__ttft_ms="1500",
    ).router_settings()
    assert (router.served_names, router.server.port, router.mode) == (("mine", "another"), 1234, "disaggregated")
    assert (router.router.min_remote_prefill_tokens, router.router.max_concurrent_requests) == (99, 5)
    assert router.prefill_window_tokens == dict.fromkeys(("prefill", "decode", "colocated", "adaptive"), 3000)
    assert (router.router.slo.ttft_limit_s, router.router.slo.tpot_limit_s) == (1.5, None)
    usual = planned().router_settings()
    assert (usual.served_names, usual.router.slo.ttft_limit_s) == (("smollm2-135m",), None)
    assert planned(model__served_model_name="one").router_settings().served_names == ("one",)


def test_router_and_engines_get_the_same_arguments_of_the_models_and_each_pool_its_own(planned, tmp_path, monkeypatch):
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    (tmp_path / "parser.py").write_text("")
    monkeypatch.chdir(tmp_path)
    plan = planned(
        engine_args__max_logprobs="7",
        engine_args__quantization="fp8",
        engine_args__numa_bind="false",
        pools__decode__engine_args__numa_bind="true",
        server_args__chat_template="chat.jinja",
        server_args__tool_parser_plugin="parser.py",
        server_args__tool_call_parser="of_the_plugin",
    )
    router = plan.router_settings()
    assert router.engine_args == {"language_model_only": True, "max_logprobs": 7}
    assert router.server_args == {
        "enable_auto_tool_choice": True,
        "sse_keep_alive_interval": 15,
        "chat_template": "{{ messages }}",
        "tool_parser_plugin": str(tmp_path / "parser.py"),
        "tool_call_parser": "of_the_plugin",
    }
    prefill, decode = (plan.engine_config(worker, "h").passed for worker in plan.workers)
    text_only = {"language_model_only": True}  # what a model sees with is not loaded: images are refused
    assert prefill == {**text_only, "max_logprobs": 7, "quantization": "fp8", "numa_bind": False}
    assert decode == {**prefill, "numa_bind": True}


@pytest.mark.parametrize(
    ("settings", "cores", "routers"),
    [
        ({}, 64, 1),  # CPUs: a router carries more than their engines make
        ({"router.processes": "3"}, 4, 3),
        ({"gpus": 1}, 16, 2),
        ({"gpus": 1, "workers": 4}, 64, 8),
        ({"gpus": 1, "workers": 4}, 24, 3),  # engines take 20, and the dispatcher one
        ({"gpus": 1}, 2, 1),
        ({"gpus": 1, "workers": 64, "ray.address": "auto"}, 256, 64),
        ({"gpus": 1, "mode": "colocated"}, 16, 2),
    ],
)
def test_auto_means_two_routers_for_an_engine_on_a_gpu_that_answers_as_far_as_cores_are_left(settings, cores, routers):
    gpus, workers = settings.pop("gpus", 0), settings.pop("workers", 1)
    pools = {f"pools.{pool}.gpus_per_worker": str(gpus) for pool in ("prefill", "decode", "colocated")}
    sizes = {f"pools.{pool}.workers": str(workers) for pool in ("decode", "colocated")} | {"pools.prefill.workers": "1"}
    of_each = {f"pools.{pool}.cores_per_worker": "4" for pool in ("prefill", "decode", "colocated")}
    config = load_config(None, {**pools, **sizes, **of_each, **settings}).config
    asked = config.router.processes
    assert (routers_for(config, cores) if asked == "auto" else asked) == routers


@pytest.mark.parametrize("wrong", ["0", "65", "many", "true"])
def test_a_number_of_routers_that_cannot_be_is_refused_with_what_can(wrong):
    with pytest.raises(ConfigError, match=r"router\.processes: .* auto .* 64"):
        load_config(None, {"router.processes": wrong})


def test_a_worker_has_two_steps_of_prompts_at_a_time_whatever_its_pools_step_is(planned):
    steps = {"pools__prefill__max_num_batched_tokens": "700"}
    windows = planned(**steps).router_settings().prefill_window_tokens
    assert windows == {"prefill": 1400, "decode": 1024, "colocated": 4096, "adaptive": 1560}


async def test_each_process_of_a_router_is_told_its_name_and_which_start_it_is(planned):
    told = []

    class Actor(RoutingHandle):
        async def begin(self):
            """Its process is there."""

        async def call(self, method, *arguments, timeout_s=None):
            told.extend(arguments if method == "prepare" else ())

    plan = planned(router__processes="2")
    router = Actor("router-1", None, plan)
    await router.prepare()
    router.follow(plan)
    await router.prepare()
    assert [(one.start.name, one.start.number) for one in told] == [("router-1", 1), ("router-1", 2)]
