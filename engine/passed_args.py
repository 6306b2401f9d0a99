"""vLLM's own arguments that a configuration may pass on: all but those that would break the split or the server.

Names and types are vLLM's: `vllm_arguments.json` is generated from its argument classes by
`python -m tests.components.engine.test_passed_args`; the test fails if they change. vLLM itself is not imported, so
that a wrong configuration is reported at once.

`words` turns accepted arguments into a command line for vLLM's own parser.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Final

from ridgeline.engine import speculation

TABLE: Final = Path(__file__).with_name("vllm_arguments.json")

FOR_THE_MODEL: Final = frozenset(
    {
        "allow_deprecated_quantization",
        "code_revision",
        "config_format",
        "disable_sliding_window",
        "enable_lora",
        "enable_moe_shared_loras",
        "enable_prefix_caching",
        "fully_sharded_loras",
        "generation_config",
        "hf_config_path",
        "hf_overrides",
        "kv_cache_dtype",
        "kv_cache_dtype_skip_layers",
        "language_model_only",
        "logprobs_mode",
        "lora_dtype",
        "lora_target_modules",
        "max_cpu_loras",
        "max_logprobs",
        "max_lora_rank",
        "max_loras",
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
        "specialize_active_lora",
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
    "enable_moe_shared_loras",
    "enable_prefix_caching",
    "fully_sharded_loras",
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "lora_dtype",
    "lora_target_modules",
    "max_cpu_loras",
    "max_loras",
    "quantization",
    "quantization_config",
    "specialize_active_lora",
}
"""The arguments the router needs too: it has the model's tokenizer, templates, limits and defaults, but no weights."""

OUR_SETTINGS: Final = {
    "allowed_origins": "server.cors_allowed_origins",
    "api_key": "security.api_keys_file",
    "block_size": "model.block_size",
    "dtype": "model.dtype",
    "enforce_eager": "model.enforce_eager",
    "host": "server.host",
    "kv_cache_memory_bytes": "pools.*.kv_cache_memory_bytes",
    "max_model_len": "model.max_model_len",
    "max_num_batched_tokens": "pools.*.max_num_batched_tokens",
    "max_num_active_seqs": "pools.*.max_num_seqs",
    "max_num_queued_reqs": "router.max_concurrent_requests",
    "max_num_queued_tokens": "router.max_queue_time_s",
    "max_num_seqs": "pools.*.max_num_seqs",
    "model": "model.path",
    "model_weights": "model.path",
    "port": "server.port",
    "served_model_name": "model.served_model_name",
    "shutdown_timeout": "server.drain_timeout_s",
    "tensor_parallel_size": "pools.*.tensor_parallel_size",
}
"""Arguments that are settings of Ridgeline's, with the names of those settings."""

REFUSED: Final = {
    "a prefill and a decode engine must keep and hand over the same blocks": (
        *("disable_hybrid_kv_cache_manager", "kv_sharing_fast_prefill"),
        *("prefix_cache_retention_interval", "prefix_match_unit", "swa_bounded_replay"),
    ),
    "KV travels by Ridgeline's own connector, which is configured under transfer": (
        *("kv_transfer_config", "kv_offloading_*", "ec_transfer_config", "kv_events_config"),
    ),
    "the KV cache must stay where it is while others read it": (
        *("*sleep*", "enable_cumem_allocator", "enable_nccl_comm_suspend"),
    ),
    "the model's state besides its KV cache would not be handed off": (
        *("*mamba*", "*replayssm*", "gdn_*", "kda_*", "engram_config", "diffusion_config"),
    ),
    "drafts are configured in one place, speculative_config": ("spec_*",),
    "all adapters of a model of experts must have the layout that it has itself": ("enable_mixed_moe_lora_format",),
    "multimodal inputs are not supported: only a prompt's tokens travel with its KV": (
        *("mm_*", "*_mm_*", "media_*", "allowed_*media_*", "video_*", "ec_manager_config", "interleave_mm_strings"),
        *("enable_tower_connector_lora",),
    ),
    "only generation is served": (
        *("convert", "runner", "pooler_config", "io_processor_plugin", "enable_flash_late_interaction"),
        *("max_lora_cls_labels",),
    ),
    "a prompt travels as tokens": ("enable_prompt_embeds",),
    "Ridgeline starts, places, pins and ends the engine's processes": (
        *("distributed_executor_backend", "worker_*", "device_ids", "ray_workers_use_nsight", "*fault_tolerance*"),
    ),
    "an engine here is one replica; more of them are workers of a pool": (
        *("data_parallel_*", "*_dp_*", "dp_*", "*elastic_ep*", "*eplb*", "*dbo*", "ubatch_size"),
        *("master_*", "nnodes", "node_rank"),
    ),
    "layers or blocks of a prompt would be spread over ranks in a way that the KV hand-off does not support": (
        *("pipeline_parallel_size", "*context_parallel*", "dcp_*", "cp_*", "enable_hc_sp"),
    ),
    "router and connector rely on the scheduler's own order and size of steps": (
        *("async_scheduling", "enable_chunked_prefill", "long_prefill_token_threshold*", "max_num_scheduled_tokens"),
        *(
            "num_gpu_blocks_override",
            "prefill_schedule_interval",
            "scheduler_cls",
            "scheduling_policy",
            "stream_interval",
        ),
        *("watermark",),
    ),
    "what it adds to an answer would not pass the router": (
        *("aux_output_config", "enable_return_routed_experts", "return_sampling_mask"),
    ),
    "a token must be sampled alike in both pools": (
        *("enable_batch_sharded_sampling", "logits_processors", "enable_trace_replay", "watermark_config"),
        *("skip_tokenizer_init",),
    ),
    "weights are read once, at the start": ("weight_transfer_config",),
    "Ridgeline reads the engine's statistics itself, and shows them at /metrics": (
        *("*metrics*", "collect_detailed_traces", "custom_histogram_buckets", "disable_log_stats", "otlp_*"),
        *("enable_layerwise_nvtx_tracing", "enable_server_load_tracking"),
    ),
    "logs are Ridgeline's, and Ray's": (
        "*access_log*",
        "*logging*",
        "log_config_file",
        "log_level",
        "uvicorn_log_level",
    ),
    "it opens paths that bypass admission and API keys": ("enable_scale_out", "profiler_config", "tokens_only"),
    "the API key check must stay outermost, and a stream must not be buffered": ("middleware",),
    "the HTTP port is Ridgeline's: see server and security": (
        *("allow_credentials", "allowed_headers", "allowed_methods", "grpc_port", "h11_*", "uds"),
    ),
    "the HTTP port has no TLS: put a proxy that terminates TLS in front of it": ("ssl_*", "enable_ssl_refresh"),
    "the server would call tools itself, and some run code that a model has written": ("tool_server",),
    "a configuration is no place for a secret: set the environment variable HF_TOKEN": ("hf_token",),
}
"""Names of arguments, with `*` for any text, that would break the split or the server, by the reason."""

Args = Mapping[str, Any]


def engine_problems(setting: str, args: Args, *, one_pool: bool) -> Iterator[str]:
    """Yield a sentence for each argument under `setting` that engines, or only those of `one_pool`, cannot be given."""
    for name, value in args.items():
        if one_pool and name in FOR_THE_MODEL:
            yield f"{setting}.{name} must be the same in router and pools: set engine_args.{name} instead."
        else:
            yield from (wrong := [*_problems(setting, name, value, "engine")])
            if name == speculation.ARGUMENT and not wrong:
                yield from speculation.problems(f"{setting}.{name}", value, one_pool=one_pool)


def server_problems(setting: str, args: Args) -> Iterator[str]:
    """Yield a sentence for each argument under `setting` that the HTTP front cannot be given."""
    for name, value in args.items():
        yield from _problems(setting, name, value, "server")
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


def is_servers(name: str) -> bool:
    """Return whether this is an argument of vLLM's HTTP front."""
    return name in _table()["server"]


def why_refused(name: str) -> str | None:
    """Return why an argument cannot be passed on; None if it can."""
    for reason, patterns in REFUSED.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return reason
    return None


def _problems(setting: str, name: str, value: Any, whose: str) -> Iterator[str]:
    path, known = f"{setting}.{name}", _table()[whose]
    other = "engine" if whose == "server" else "server"
    if name in OUR_SETTINGS:
        yield f"{path} is one of Ridgeline's own settings: set {OUR_SETTINGS[name]} instead."
    elif (reason := why_refused(name)) is not None:
        yield f"{path} cannot be passed on, since {reason}: leave it out."
    elif name in known and name != "lora_modules":  # of which each entry may be `name=path` too
        yield from _wrong_type(path, value, known[name])
    elif name in known:
        yield from _wrong_modules(path, value)
    elif name in _table()[other]:
        yield f"{path} is not one of the {whose}'s arguments: it belongs in {other}_args.{name}."
    else:
        near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"engine/{TABLE.name} has all names and types."
        yield f"{path} is not an argument of vLLM's {whose}: {hint}"


def adapter_modules(value: Any) -> list[dict[str, str]]:
    """Return each entry of `lora_modules` as a table; `name=path` is short for one. Entries of other kinds are left."""
    return [
        dict(zip(("name", "path"), each.split("=", 1), strict=True)) if isinstance(each, str) and "=" in each else each
        for each in (value if isinstance(value, list) else [value])
    ]


def adapter_problems(engine_args: Args, server_args: Args, served_names: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each setting of LoRA adapters that makes no sense beside the others."""
    modules = server_args.get("lora_modules")
    if not engine_args.get("enable_lora"):
        needing = [f"engine_args.{name}" for name in _OF_LORA if engine_args.get(name) is not None]
        for name in [*needing, *(["server_args.lora_modules"] if modules else [])]:
            yield f"{name} has no effect on engines without LoRA: set engine_args.enable_lora to true, or leave it out."
    most, kept = engine_args.get("max_loras", 1), engine_args.get("max_cpu_loras")
    if isinstance(most, int) and most < 1:
        yield f"engine_args.max_loras must be 1 or more, not {most}."
    elif isinstance(kept, int) and isinstance(most, int) and kept < most:
        yield (
            f"engine_args.max_cpu_loras ({kept}) is less than max_loras ({most}), and a step has only adapters in "
            f"memory: raise it to at least {most}."
        )
    taken = [*served_names]
    for module in adapter_modules(modules or []):
        if not isinstance(module, dict) or "name" not in module:
            continue
        name = module["name"]
        if name in taken:
            yield f"server_args.lora_modules: {name} is the name of two models: give each its own."
        taken.append(name)
        if (base := module.get("base_model_name")) and base not in served_names:
            yield (
                f"server_args.lora_modules: the base model of {name} is {base}, and {served_names[0]} is served: leave "
                "the adapter out, or serve its base model."
            )


_OF_LORA: Final = (
    *("fully_sharded_loras", "lora_dtype", "lora_target_modules", "max_cpu_loras", "max_lora_rank", "max_loras"),
    *("enable_moe_shared_loras", "specialize_active_lora"),
)


def _wrong_modules(path: str, value: Any) -> Iterator[str]:
    for module in adapter_modules(value if value is not None else []):
        fields = module if isinstance(module, dict) else {}
        known = fields.keys() <= {"name", "path", "base_model_name"}
        if not (known and all(isinstance(fields.get(name), str) and fields[name] for name in ("name", "path"))):
            yield f"{path} must be a list of `name=path`, or of tables with name and path, and has {module!r}."


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
