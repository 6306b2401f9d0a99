"""vLLM's own arguments that a configuration may pass on, by name and type, and the reasons why others are refused.

Names and types are vLLM's: `vllm_arguments.json` is generated from its argument classes by
`python -m tests.components.engine.test_passed_args`. The test fails if they change, or if vLLM has a new argument that
is in none of the tables here. vLLM itself is not imported, so that a wrong configuration is reported at once.

`words` turns accepted arguments into a command line for vLLM's own parser.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

TABLE: Final = Path(__file__).with_name("vllm_arguments.json")

FOR_THE_MODEL: Final = frozenset(
    {
        "allow_deprecated_quantization",
        "code_revision",
        "config_format",
        "disable_sliding_window",
        "generation_config",
        "hf_config_path",
        "hf_overrides",
        "kv_cache_dtype",
        "kv_cache_dtype_skip_layers",
        "language_model_only",
        "logprobs_mode",
        "max_logprobs",
        "model_class_overrides",
        "model_impl",
        "override_generation_config",
        "quantization",
        "quantization_config",
        "reasoning_config",
        "reasoning_parser",
        "reasoning_parser_plugin",
        "revision",
        "seed",
        "structured_outputs_config",
        "tokenizer",
        "tokenizer_mode",
        "tokenizer_revision",
        "trust_remote_code",
        "use_fp64_gumbel",
    }
)
"""Properties of the model: the router and all engines need the same value, or their tokens and KV would not match."""

READ_BY_THE_ROUTER: Final = FOR_THE_MODEL - {
    "allow_deprecated_quantization",
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "quantization",
    "quantization_config",
}
"""The arguments the router needs too: it has the model's tokenizer, templates, limits and defaults, but no weights."""

FOR_ONE_POOL: Final = frozenset(
    {
        "additional_config",
        "all2all_backend",
        "attention_backend",
        "attention_config",
        "compilation_config",
        "cpu_distributed_timeout_seconds",
        "cpu_offload_gb",
        "cpu_offload_params",
        "cudagraph_capture_sizes",
        "disable_custom_all_reduce",
        "distributed_timeout_seconds",
        "download_dir",
        "enable_ep_weight_filter",
        "enable_expert_parallel",
        "enable_flashinfer_autotune",
        "expert_placement_strategy",
        "gpu_memory_utilization",
        "ignore_patterns",
        "ir_op_priority",
        "jit_monitor_mode",
        "jit_monitor_verbose",
        "kernel_config",
        "linear_backend",
        "load_format",
        "max_cudagraph_capture_size",
        "max_parallel_loading_workers",
        "model_loader_extra_config",
        "moe_backend",
        "numa_bind",
        "numa_bind_cpus",
        "numa_bind_nodes",
        "offload_backend",
        "offload_group_size",
        "offload_num_in_group",
        "offload_params",
        "offload_prefetch_step",
        "optimization_level",
        "performance_mode",
        "prefix_caching_hash_algo",
        "pt_load_map_location",
        "safetensors_load_strategy",
        "safetensors_prefetch_block_size",
        "safetensors_prefetch_num_threads",
        "scheduler_reserve_full_isl",
        "sparse_indexer_topk_backend",
        "use_tqdm_on_load",
    }
)
"""How an engine computes and loads; pools may differ in these."""

ENGINE_ARGS: Final = FOR_THE_MODEL | FOR_ONE_POOL

SERVER_ARGS: Final = frozenset(
    {
        "anthropic_disabled_thinking_effort",
        "chat_template",
        "chat_template_content_format",
        "cohere_format",
        "cohere_is_reasoning_model",
        "default_chat_template_kwargs",
        "disable_fastapi_docs",
        "enable_auto_tool_choice",
        "enable_force_include_usage",
        "enable_log_deltas",
        "enable_log_outputs",
        "enable_log_requests",
        "enable_offline_docs",
        "enable_prompt_tokens_details",
        "enable_request_id_headers",
        "enable_tokenizer_info_endpoint",
        "exclude_tools_when_tool_choice_none",
        "fingerprint_mode",
        "fingerprint_value",
        "log_error_stack",
        "max_log_len",
        "renderer_num_workers",
        "response_role",
        "return_tokens_as_token_ids",
        "root_path",
        "sse_keep_alive_interval",
        "tool_call_parser",
        "tool_parser_plugin",
        "tool_strict_level",
        "trust_request_chat_template",
    }
)
"""What vLLM's HTTP front does with requests and answers."""

OUR_SETTINGS: Final = {
    "allowed_origins": "server.cors_allowed_origins",
    "api_key": "security.api_keys_file",
    "block_size": "model.block_size_tokens",
    "dtype": "model.dtype",
    "enforce_eager": "model.enforce_eager",
    "host": "server.host",
    "kv_cache_memory_bytes": "pools.*.kv_cache_bytes",
    "max_model_len": "model.max_model_len_tokens",
    "max_num_batched_tokens": "pools.*.max_num_batched_tokens",
    "max_num_active_seqs": "pools.*.max_num_seqs",
    "max_num_queued_reqs": "router.max_outstanding_requests",
    "max_num_queued_tokens": "router.max_prompt_wait_s",
    "max_num_seqs": "pools.*.max_num_seqs",
    "model": "model.path",
    "model_weights": "model.path",
    "port": "server.port",
    "served_model_name": "model.served_name",
    "shutdown_timeout": "server.drain_timeout_s",
    "tensor_parallel_size": "pools.*.tensor_parallel",
}
"""Arguments that are settings of Ridgeline's, with the names of those settings."""

_KV = "a prefill and a decode engine must keep and hand over the same blocks"
_OTHER_CONNECTOR = "KV travels by Ridgeline's own connector, which is configured under transfer"
_PROCESSES = "Ridgeline starts, places, pins and ends the engine's processes"
_SPREAD = "an engine here is one replica; more of them are workers of a pool"
_CONTEXT = "the blocks of a prompt would be spread over ranks in a way that the KV hand-off does not support"
_LORA = "adapters are not supported: a prompt's KV would have to be handed off with its adapter"
_IMAGES = "multimodal inputs are not supported: only a prompt's tokens travel with its KV"
_POOLING = "only generation is served"
_STATE = "the model's state besides its KV cache would not be handed off"
_DRAFT = "a draft's KV would not be handed off, so decode would have nothing to draft from"
_STEPS = "router and connector rely on the scheduler's own order of steps"
_STATISTICS = "Ridgeline reads the engine's statistics itself, and shows them at /metrics"
_LOGS = "logs are Ridgeline's, and Ray's"
_HTTP = "the HTTP port is Ridgeline's: see server and security"
_TLS = "the HTTP port has no TLS: put a proxy that terminates TLS in front of it"
_DOORS = "it opens paths that bypass admission and API keys"
_PAGES = "server.cors_allowed_origins says which pages may send requests, and pages send keys, not cookies"
_WEIGHTS = "weights are read once, at the start"

REFUSED: Final = {
    "aggregate_engine_logging": _LOGS,
    "allow_credentials": _PAGES,
    "allowed_headers": _PAGES,
    "allowed_local_media_path": _IMAGES,
    "allowed_media_domains": _IMAGES,
    "allowed_methods": _PAGES,
    "api_server_count": "the router is one process: its queue is what makes it fair",
    "async_scheduling": _STEPS,
    "aux_output_config": "what it adds to an answer would not pass the router",
    "collect_detailed_traces": _STATISTICS,
    "config": "this file is the configuration",
    "convert": _POOLING,
    "cp_kv_cache_interleave_size": _CONTEXT,
    "cudagraph_metrics": _STATISTICS,
    "custom_histogram_buckets": _STATISTICS,
    "data_parallel_address": _SPREAD,
    "data_parallel_backend": _SPREAD,
    "data_parallel_external_lb": _SPREAD,
    "data_parallel_hybrid_lb": _SPREAD,
    "data_parallel_multi_port_external_lb": _SPREAD,
    "data_parallel_rank": _SPREAD,
    "data_parallel_rpc_port": _SPREAD,
    "data_parallel_size": _SPREAD,
    "data_parallel_size_local": _SPREAD,
    "data_parallel_start_rank": _SPREAD,
    "data_parallel_supervisor_port": _SPREAD,
    "dbo_decode_token_threshold": _SPREAD,
    "dbo_prefill_token_threshold": _SPREAD,
    "dcp_comm_backend": _CONTEXT,
    "dcp_kv_cache_interleave_size": _CONTEXT,
    "dcp_q_replicate": _CONTEXT,
    "decode_context_parallel_size": _CONTEXT,
    "default_mm_loras": _LORA,
    "device_ids": _PROCESSES,
    "diffusion_config": _STATE,
    "disable_access_log_for_endpoints": _LOGS,
    "disable_cascade_attn": "vLLM has no cascade attention any more",
    "disable_chunked_mm_input": _IMAGES,
    "disable_hybrid_kv_cache_manager": _KV,
    "disable_log_stats": _STATISTICS,
    "disable_nccl_for_dp_synchronization": _SPREAD,
    "disable_uvicorn_access_log": _LOGS,
    "distributed_executor_backend": _PROCESSES,
    "dp_supervisor_probe_failure_threshold": _SPREAD,
    "dp_supervisor_probe_interval_s": _SPREAD,
    "dp_supervisor_probe_timeout_s": _SPREAD,
    "dp_sync_interval": _SPREAD,
    "ec_manager_config": _IMAGES,
    "ec_transfer_config": _OTHER_CONNECTOR,
    "elastic_ep_max_dp_size": _SPREAD,
    "enable_batch_sharded_sampling": "a token must be sampled alike in both pools",
    "enable_chunked_prefill": "prompts longer than a step are computed in chunks, and handed off chunk by chunk",
    "enable_cumem_allocator": "the KV cache must stay where it is while others read it",
    "enable_dbo": _SPREAD,
    "enable_elastic_ep": _SPREAD,
    "enable_eplb": _SPREAD,
    "enable_fault_tolerance": "Ridgeline supervises the engines: see supervision",
    "enable_flash_late_interaction": _POOLING,
    "enable_hc_sp": _CONTEXT,
    "enable_layerwise_nvtx_tracing": _STATISTICS,
    "enable_logging_iteration_details": _LOGS,
    "enable_lora": _LORA,
    "enable_mamba_cache_stochastic_rounding": _STATE,
    "enable_mamba_shared_prefix_checkpoint": _STATE,
    "enable_mfu_metrics": _STATISTICS,
    "enable_mixed_moe_lora_format": _LORA,
    "enable_mm_embeds": _IMAGES,
    "enable_mm_processor_stats": _IMAGES,
    "enable_moe_shared_loras": _LORA,
    "enable_nccl_comm_suspend": "the KV cache must stay where it is while others read it",
    "enable_per_request_metrics": _STATISTICS,
    "enable_prefix_caching": "transferred KV, and KV computed again after a loss, is found by its prefix",
    "enable_prompt_embeds": "a prompt travels as tokens",
    "enable_return_routed_experts": "what it adds to an answer would not pass the router",
    "enable_scale_out": _DOORS,
    "enable_server_load_tracking": _STATISTICS,
    "enable_shm_tensor_arena": _PROCESSES,
    "enable_sleep_mode": "the KV cache must stay where it is while others read it",
    "enable_ssl_refresh": _TLS,
    "enable_tower_connector_lora": _LORA,
    "enable_trace_replay": "Ridgeline repeats tokens with a processor of its own",
    "engram_config": _STATE,
    "eplb_config": _SPREAD,
    "fail_on_environ_validation": "Ridgeline sets the environment of engines",
    "fault_tolerance_config": "Ridgeline supervises the engines: see supervision",
    "fully_sharded_loras": _LORA,
    "gdn_prefill_backend": _STATE,
    "grpc": _HTTP,
    "grpc_port": _HTTP,
    "h11_max_header_count": _HTTP,
    "h11_max_incomplete_event_size": _HTTP,
    "headless": _PROCESSES,
    "hf_token": "a configuration is no place for a secret: set the environment variable HF_TOKEN",
    "interleave_mm_strings": _IMAGES,
    "io_processor_plugin": _POOLING,
    "kda_decode_backend": _STATE,
    "kda_prefill_backend": _STATE,
    "kv_cache_metrics": _STATISTICS,
    "kv_cache_metrics_sample": _STATISTICS,
    "kv_events_config": "nothing here listens to KV events, and the engines of a node would share a port",
    "kv_offloading_backend": _OTHER_CONNECTOR,
    "kv_offloading_size": _OTHER_CONNECTOR,
    "kv_sharing_fast_prefill": "it leaves the KV of prompts incomplete",
    "kv_transfer_config": _OTHER_CONNECTOR,
    "limit_mm_per_prompt": _IMAGES,
    "log_config_file": _LOGS,
    "log_level": _LOGS,
    "logging_config": _LOGS,
    "logits_processors": "Ridgeline repeats tokens with a processor of its own",
    "long_prefill_token_threshold": "a prompt's chunks must be those that the router expects",
    "long_prefill_token_threshold_adaptive": "a prompt's chunks must be those that the router expects",
    "lora_dtype": _LORA,
    "lora_modules": _LORA,
    "lora_target_modules": _LORA,
    "mamba_backend": _STATE,
    "mamba_block_size": _STATE,
    "mamba_cache_dtype": _STATE,
    "mamba_cache_mode": _STATE,
    "mamba_cache_philox_rounds": _STATE,
    "mamba_config": _STATE,
    "mamba_ssm_cache_dtype": _STATE,
    "mamba_ssu_algorithm": _STATE,
    "master_addr": _SPREAD,
    "master_port": _SPREAD,
    "max_cpu_loras": _LORA,
    "max_lora_cls_labels": _LORA,
    "max_lora_rank": _LORA,
    "max_loras": _LORA,
    "max_num_scheduled_tokens": "a prompt's chunks must be those that the router expects",
    "media_io_kwargs": _IMAGES,
    "middleware": "the API key check must stay outermost, and a stream must not be buffered",
    "mm_device_do_normalize": _IMAGES,
    "mm_encoder_attn_backend": _IMAGES,
    "mm_encoder_attn_dtype": _IMAGES,
    "mm_encoder_fp8_scale_path": _IMAGES,
    "mm_encoder_fp8_scale_save_margin": _IMAGES,
    "mm_encoder_fp8_scale_save_path": _IMAGES,
    "mm_encoder_only": _IMAGES,
    "mm_encoder_tp_mode": _IMAGES,
    "mm_hasher_algorithm": _IMAGES,
    "mm_ipc_gpu_memory_gb": _IMAGES,
    "mm_processor_cache_gb": _IMAGES,
    "mm_processor_cache_type": _IMAGES,
    "mm_processor_device": _IMAGES,
    "mm_processor_kwargs": _IMAGES,
    "mm_shm_cache_max_object_size_mb": _IMAGES,
    "mm_tensor_ipc": _IMAGES,
    "model_tag": "the model is model.path",
    "nnodes": _SPREAD,
    "node_rank": _SPREAD,
    "num_gpu_blocks_override": "the router expects the blocks that kv_cache_bytes gives",
    "otlp_traces_endpoint": _STATISTICS,
    "per_request_spec_decode_metrics": _DRAFT,
    "pipeline_parallel_size": "the KV hand-off does not support layers that are spread over ranks",
    "pooler_config": _POOLING,
    "prefill_context_parallel_size": _CONTEXT,
    "prefill_schedule_interval": _STEPS,
    "prefix_cache_retention_interval": _KV,
    "prefix_match_unit": _KV,
    "profiler_config": _DOORS,
    "ray_workers_use_nsight": _PROCESSES,
    "replayssm_buffer_len": _STATE,
    "return_sampling_mask": "what it adds to an answer would not pass the router",
    "runner": _POOLING,
    "scheduler_cls": _STEPS,
    "scheduling_policy": "the router orders prompts, fair among clients",
    "show_hidden_metrics_for_version": _STATISTICS,
    "skip_mm_profiling": _IMAGES,
    "skip_tokenizer_init": "grammars need the tokenizer in the engine",
    "sleep_mode_offload_cudagraph": "the KV cache must stay where it is while others read it",
    "sleep_preserve_parameter_names": "the KV cache must stay where it is while others read it",
    "spec_method": _DRAFT,
    "spec_model": _DRAFT,
    "spec_tokens": _DRAFT,
    "specialize_active_lora": _LORA,
    "speculative_config": _DRAFT,
    "ssl_ca_certs": _TLS,
    "ssl_cert_reqs": _TLS,
    "ssl_certfile": _TLS,
    "ssl_ciphers": _TLS,
    "ssl_keyfile": _TLS,
    "stream_interval": "the router needs every token as soon as it is sampled: for stop strings and request migration",
    "swa_bounded_replay": _KV,
    "tokens_only": _DOORS,
    "tool_server": "the server would call tools itself, and some run code that a model has written",
    "trust_request_mm_kwargs": _IMAGES,
    "ubatch_size": _SPREAD,
    "uds": _HTTP,
    "use_replayssm": _STATE,
    "uvicorn_log_level": _LOGS,
    "video_pruning_method": _IMAGES,
    "video_pruning_rate": _IMAGES,
    "watermark": _STEPS,
    "watermark_config": "the two engines of a request would have to agree on more than its tokens",
    "weight_transfer_config": _WEIGHTS,
    "worker_cls": _PROCESSES,
    "worker_extension_cls": _PROCESSES,
}
"""Arguments that would break the split or the server, with the reason."""

Args = Mapping[str, Any]


def engine_problems(setting: str, args: Args, *, one_pool: bool) -> Iterator[str]:
    """Yield a sentence for each argument under `setting` that engines, or only those of `one_pool`, cannot be given."""
    for name, value in args.items():
        if one_pool and name in FOR_THE_MODEL:
            yield f"{setting}.{name} must be the same in router and pools: set engine_args.{name} instead."
        else:
            yield from _problems(setting, name, value, "engine", ENGINE_ARGS, ("server_args", SERVER_ARGS))


def server_problems(setting: str, args: Args) -> Iterator[str]:
    """Yield a sentence for each argument under `setting` that the HTTP front cannot be given."""
    for name, value in args.items():
        yield from _problems(setting, name, value, "server", SERVER_ARGS, ("engine_args", ENGINE_ARGS))
    parser, plugin = args.get("tool_call_parser"), args.get("tool_parser_plugin")
    if args.get("enable_auto_tool_choice") and not parser:
        yield f"{setting}.enable_auto_tool_choice needs a parser: set {setting}.tool_call_parser, for example hermes."
    if isinstance(parser, str) and not plugin:
        yield from _unknown_parser(
            f"{setting}.tool_call_parser", parser, "tool_parsers", f"{setting}.tool_parser_plugin"
        )


def reasoning_problems(setting: str, args: Args) -> Iterator[str]:
    """Yield a sentence if vLLM does not have the reasoning parser."""
    parser = args.get("reasoning_parser")
    if isinstance(parser, str) and parser and not args.get("reasoning_parser_plugin"):
        plugin = f"{setting}.reasoning_parser_plugin"
        yield from _unknown_parser(f"{setting}.reasoning_parser", parser, "reasoning_parsers", plugin)


def words(args: Args) -> list[str]:
    """Return the arguments as a command line for vLLM's own parser, which converts them to vLLM's types."""
    return [word for name, value in args.items() for word in _words(name.replace("_", "-"), value)]


def is_template(chat_template: object) -> bool:
    """Return whether this is a chat template itself rather than the name of a file with one."""
    return isinstance(chat_template, str) and ("{" in chat_template or "\n" in chat_template)


def for_the_router(args: Args) -> dict[str, Any]:
    """Return those of the engines' arguments that the HTTP front needs too."""
    return {name: value for name, value in args.items() if name in READ_BY_THE_ROUTER}


def front(args: Args) -> dict[str, Any]:
    """Return the server's arguments; with a parser of tool calls these are enabled.

    A stream is silent while a call is written, and proxies cut one that is silent for a minute (nginx:
    proxy_read_timeout): a comment comes well before.
    """
    automatic = {"enable_auto_tool_choice": True, "sse_keep_alive_interval": 15}
    return {**automatic, **args} if args.get("tool_call_parser") else {**args}


def _words(flag: str, value: Any) -> Iterator[str]:
    if value is None:
        return
    if isinstance(value, bool):
        yield f"--{flag}" if value else f"--no-{flag}"
    elif isinstance(value, list):
        yield from (f"--{flag}", *map(str, value))
    elif isinstance(value, dict):
        yield f"--{flag}={json.dumps(value)}"
    else:
        yield f"--{flag}={value}"


def _problems(
    setting: str, name: str, value: Any, whose: str, allowed: frozenset[str], other: tuple[str, frozenset[str]]
) -> Iterator[str]:
    path = f"{setting}.{name}"
    if name in OUR_SETTINGS:
        yield f"{path} is one of Ridgeline's own settings: set {OUR_SETTINGS[name]} instead."
    elif name in REFUSED:
        yield f"{path} cannot be passed on, since {REFUSED[name]}: leave it out."
    elif name in other[1]:
        yield f"{path} is not one of the {whose}'s arguments: it belongs in {other[0]}.{name}."
    elif name not in allowed:
        near = difflib.get_close_matches(name.replace("-", "_"), allowed, n=1)
        hint = f"did you mean {near[0]}?" if near else f"engine/{TABLE.name} has all names and types."
        yield f"{path} is not an argument of vLLM's {whose}: {hint}"
    else:
        yield from _wrong_type(path, value, _table()["arguments"][name])


def _wrong_type(path: str, value: Any, schema: Any) -> Iterator[str]:
    import jsonschema  # slow to import, and most configurations pass nothing on

    if not jsonschema.Draft202012Validator(schema).is_valid(value):
        yield f"{path} must be {_described(schema)}, not {value!r}."


def _described(schema: Any) -> str:
    kinds = schema.get("anyOf", [schema])
    return " or ".join(_kind(kind) for kind in kinds)


def _kind(schema: Any) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    names = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false"}
    names |= {"object": "a table", "array": "a list", "null": "null"}
    return names.get(schema.get("type"), "something else")


def _unknown_parser(setting: str, parser: str, kind: str, plugin: str) -> Iterator[str]:
    known = _table()[kind]
    if parser not in known:
        near = difflib.get_close_matches(parser, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}."
        yield f"{setting}: vLLM has no parser {parser!r}, and {plugin} names no file with one: {hint}"


@cache
def _table() -> Any:
    return json.loads(TABLE.read_text(encoding="utf-8"))
