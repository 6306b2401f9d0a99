"""Arguments for vLLM in a configuration: each of vLLM's is known by name and type, and judged before anything starts.

`python -m tests.components.engine.test_passed_args` writes engine/vllm_arguments.json anew.
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import json
import subprocess
import sys
import types
import typing
from typing import Any

import pytest
from vllm.engine import arg_utils
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs, make_arg_parser
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from ridgeline.cluster.config.loader import ConfigError, load_config
from ridgeline.engine import passed_args
from ridgeline.engine.vllm_arguments import engine_values
from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly

PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
PLAIN |= {dict: "object", list: "array", set: "array"}


def schema_of(annotation: Any) -> dict[str, Any]:
    """JSON Schema of what a YAML file may say for an argument of this type; classes of vLLM's are tables."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return schema_of(parts[0])
    if origin in (typing.Union, types.UnionType):
        found = [schema_of(part) for part in parts]
        return {"anyOf": [schema for index, schema in enumerate(found) if schema not in found[:index]]}
    if origin is typing.Literal:
        return {"enum": list(parts)}
    if origin in (list, set):
        return {"type": "array", "items": schema_of(parts[0])}
    if annotation in PLAIN or origin in PLAIN:
        return {"type": PLAIN[origin or annotation]}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return {"enum": sorted(annotation.__members__)}
    return {} if annotation is Any else {"type": "object"}


def arguments_of(kind: type) -> dict[str, dict[str, Any]]:
    """Of each field. One is annotated in a string, with a class of its own."""
    names = vars(arg_utils) | {"QuantizationConfigArgs": dict}
    return {
        field.name: schema_of(eval(field.type, names) if isinstance(field.type, str) else field.type)
        for field in dataclasses.fields(kind)
        if not field.name.startswith("_")
    }


def table() -> dict[str, Any]:
    """What engine/vllm_arguments.json must hold."""
    return {
        "tool_parsers": sorted(ToolParserManager.list_registered()),
        "reasoning_parsers": sorted(ReasoningParserManager.list_registered()),
        "engine": dict(sorted(arguments_of(AsyncEngineArgs).items())),
        "server": dict(sorted(arguments_of(FrontendArgs).items())),
    }


def text_of(contents: dict[str, Any]) -> str:
    """One argument a line, so that a change of vLLM's can be read."""
    parts = [f"  {json.dumps(name)}: {json.dumps(contents[name])}" for name in ("tool_parsers", "reasoning_parsers")]
    for group in ("engine", "server"):
        lines = [f"    {json.dumps(name)}: {json.dumps(schema)}" for name, schema in contents[group].items()]
        parts.append(f'  "{group}": {{\n' + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


@pytest.fixture(scope="module")
def parser() -> Any:
    return make_arg_parser(FlexibleArgumentParser())


DRAFT = "{method: draft_model, model: small, num_speculative_tokens: 2}"


def problems_of(**overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {name.replace("__", "."): value for name, value in overrides.items()})
    return caught.value.problems


def only_problem_of(**overrides: str) -> str:
    problems = problems_of(**overrides)
    assert len(problems) == 1, problems
    return problems[0]


def test_the_table_of_vllms_arguments_is_the_installed_vllms():
    assert json.loads(passed_args.TABLE.read_text()) == table(), (
        "run `python -m tests.components.engine.test_passed_args`"
    )


def passed_on(group: str) -> list[str]:
    return [
        name
        for name in table()[group]
        if name not in passed_args.OUR_SETTINGS and passed_args.why_refused(name) is None
    ]


def test_every_name_that_is_judged_is_an_argument_of_vllms(parser):
    known = {*table()["engine"], *table()["server"], *(action.dest for action in parser._actions)}
    judged = [*passed_args.OUR_SETTINGS, *passed_args.FOR_THE_MODEL]
    assert [name for name in judged if name not in known] == []
    patterns = [pattern for patterns in passed_args.REFUSED.values() for pattern in patterns]
    assert [pattern for pattern in patterns if not fnmatch.filter(known, pattern)] == []
    assert [name for name in passed_args.FOR_THE_MODEL if name not in passed_on("engine")] == []


def test_every_argument_for_the_engine_has_a_flag_of_vllms_parser(parser):
    for name in passed_on("engine"):
        flag, is_switch = name.replace("_", "-"), table()["engine"][name] == {"type": "boolean"}
        flags = [f"--{flag}"] + [f"--no-{flag}"] * is_switch
        assert all(flag in parser._option_string_actions for flag in flags), name


PASSED = {
    "attention_backend": "CPU_ATTN",
    "compilation_config": {"mode": 0},
    "gpu_memory_utilization": 1.0,
    "hf_overrides": {"a.b": {"c": [1, "x y"]}},
    "kv_cache_dtype": "fp8",
    "max_logprobs": 5,
    "numa_bind_nodes": [0, 1],
    "optimization_level": "O2",
    "override_generation_config": {"temperature": 0.5},
    "reasoning_parser": "qwen3",
    "revision": "v1.0",
    "trust_remote_code": True,
    "use_tqdm_on_load": False,
}


def test_the_engine_gets_them_in_vllms_own_types():
    values = engine_values({**PASSED, "tokenizer": None})
    assert values.keys() == PASSED.keys()
    args = AsyncEngineArgs(model="m", **values)
    assert args.compilation_config.mode == 0
    plain = PASSED.keys() - {"compilation_config", "optimization_level"}
    assert {name: getattr(args, name) for name in plain} == {name: PASSED[name] for name in plain}


def test_what_vllms_parser_refuses_is_an_error_and_does_not_end_the_process():
    with pytest.raises(ValueError, match=r"vLLM refuses engine_args: .*max-logprobs.*invalid"):
        engine_values({"max_logprobs": "many"})


@pytest.mark.parametrize(
    ("override", "named"),
    [
        pytest.param({"engine_args.max_logprob": "5"}, "max_logprobs?", id="no argument"),
        pytest.param({"engine_args.max_logprobs": "many"}, "whole number", id="a number"),
        pytest.param({"engine_args.trust_remote_code": "1"}, "true or false", id="a switch"),
        pytest.param({"engine_args.kv_cache_dtype": "int3"}, "auto, float16,", id="one of some"),
        pytest.param({"engine_args.revision": "[a]"}, "text or null", id="one of two types"),
        pytest.param({"engine_args.block_size": "16"}, "model.block_size", id="a setting of ours"),
        pytest.param({"engine_args.tool_call_parser": "hermes"}, "server_args.tool_call_parser", id="the server's"),
        pytest.param({"engine_args.kv_transfer_config": "{}"}, "engine_args.kv_transfer_config", id="refused"),
        pytest.param(
            {"pools.decode.engine_args.kv_cache_dtype": "fp8"}, "engine_args.kv_cache_dtype", id="the model's"
        ),
        pytest.param(
            {
                "engine_args.enable_lora": "true",
                "pools.decode.engine_args.speculative_config": "{method: ngram, num_speculative_tokens: 2}",
            },
            "pools.decode: adapters together with speculation have not run",
            id="drafts beside adapters",
        ),
        pytest.param(
            {
                "engine_args.enable_expert_parallel": "true",
                "pools.decode.tensor_parallel_size": "2",
                "pools.decode.cores_per_worker": "2",
            },
            "pools.decode: vLLM's kernels for CPUs",
            id="experts by rank, on CPUs",
        ),
        pytest.param(
            {
                "engine_args.speculative_config": "{method: mtp, num_speculative_tokens: 1}",
                "pools.prefill.engine_args.speculative_config": "null",
            },
            "replaces drafts whose KV travels",
            id="no drafts in one pool",
        ),
        pytest.param(
            {
                "engine_args.speculative_config": "{method: mtp, num_speculative_tokens: 1}",
                "pools.prefill.gpus_per_worker": "1",
                "pools.decode.gpus_per_worker": "1",
            },
            "has not run on GPUs with a hand-off",
            id="drafts with KV on GPUs",
        ),
        pytest.param({"engine_args.speculative_config": "{method: medusa}"}, "have not run", id="another drafter"),
        pytest.param({"engine_args.speculative_config": "{method: ngram}"}, "num_speculative_tokens", id="no tokens"),
        *(
            pytest.param({"engine_args.speculative_config": f"{{method: ngram, {keys}}}"}, named, id=keys)
            for keys, named in (
                ("num_speculative_tokens: true", "num_speculative_tokens"),
                ("num_speculative_tokens: 2, prompt_lookup_max: 0", "prompt_lookup_max"),
                ("num_speculative_tokens: 2, prompt_lookup_min: 5, prompt_lookup_max: 3", "prompt_lookup_min"),
            )
        ),
        pytest.param({"engine_args.speculative_config": "{method: [ngram]}"}, "method", id="a list of methods"),
        pytest.param(
            {"engine_args.speculative_config": "{method: draft_model, num_speculative_tokens: 2}"},
            "model",
            id="no model",
        ),
        pytest.param({"engine_args.enable_lora": "true", "engine_args.max_loras": "0"}, "max_loras", id="no adapters"),
        pytest.param(
            {"engine_args.speculative_config": "{method: ngram, rejection_sample_method: x}"},
            "rejection_sample_method",
            id="accepts other tokens",
        ),
        pytest.param(
            {"pools.decode.engine_args.speculative_config": DRAFT},
            "engine_args.speculative_config instead",
            id="a draft with KV",
        ),
        pytest.param({"server_args.port": "80"}, "server.port", id="a setting of the server's"),
        pytest.param({"server_args.middleware": "[x.y]"}, "server_args.middleware", id="refused of the server"),
        pytest.param({"server_args.ssl_keyfile": "k.pem"}, "TLS", id="TLS"),
        pytest.param({"server_args.enable_auto_tool_choice": "true"}, "server_args.tool_call_parser", id="no parser"),
        pytest.param({"server_args.tool_call_parser": "hermis"}, "mean hermes?", id="an unknown parser"),
        pytest.param({"engine_args.reasoning_parser": "qwen"}, "engine_args.reasoning_parser", id="of reasoning"),
        pytest.param({"server_args.chat_template": "no/such.jinja"}, "server_args.chat_template", id="no such file"),
        pytest.param({"engine_args.gpu_memory_utilization": "0.8"}, "gpu_memory_utilization", id="has no effect"),
    ],
)
def test_what_cannot_be_passed_on_is_a_sentence_that_names_it_and_the_way_out(override, named):
    problems = problems_of(**override)
    assert any(named in problem for problem in problems), problems
    assert all(problem.endswith((".", "?")) for problem in problems)


def test_the_part_of_a_gpu_that_must_be_free_may_stand_beside_the_size_of_the_cache():
    gpus = {f"pools.{pool}.gpus_per_worker": "1" for pool in ("prefill", "decode", "colocated")}
    sizes = {f"pools.{pool}.kv_cache_memory_bytes": "8 GiB" for pool in ("prefill", "decode")}
    assert load_config(None, {**gpus, **sizes, "engine_args.gpu_memory_utilization": "0.3"}).config


def test_what_breaks_the_split_is_refused_by_name_whatever_its_value():
    for name in ("distributed_executor_backend", "scheduler_cls", "worker_cls", "spec_model"):
        assert f"engine_args.{name} cannot be passed on, since" in only_problem_of(**{f"engine_args.{name}": "null"})


LORA = {"engine_args.enable_lora": "true"}


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ({"server_args.lora_modules": "[sql=/a]"}, "engine_args.enable_lora"),
        ({"engine_args.max_loras": "2"}, "engine_args.enable_lora"),
        ({**LORA, "engine_args.max_loras": "3", "engine_args.max_cpu_loras": "2"}, "at least 3"),
        ({**LORA, "engine_args.max_lora_rank": "12"}, "512"),
        ({**LORA, "pools.decode.engine_args.max_loras": "2"}, "set engine_args.max_loras"),
        ({**LORA, "server_args.lora_modules": "[sql=/a, sql=/b]"}, "sql"),
        ({**LORA, "server_args.lora_modules": "[m=/a]", "model.served_model_name": "m"}, "give each its own"),
        ({**LORA, "server_args.lora_modules": "[/a]"}, "name=path"),
        ({**LORA, "server_args.lora_modules": "{sql: /a}"}, "name=path"),
        ({**LORA, "server_args.lora_modules": "[{name: sql, path: /a, base_model_name: other}]"}, "other"),
        ({**LORA, "engine_args.enable_tower_connector_lora": "true"}, "multimodal"),
    ],
)
def test_adapters_that_no_engine_could_serve_are_refused(override, named):
    sentence = only_problem_of(**override)
    assert named in sentence
    assert sentence.endswith(".")


def test_adapters_are_written_as_for_vllm():
    modules = "[sql=/a=b, {name: chat, path: org/chat}]"
    config = load_config(None, {**LORA, "server_args.lora_modules": modules, "engine_args.max_loras": "2"}).config
    assert passed_args.adapter_modules(config.server_args["lora_modules"]) == [
        {"name": "sql", "path": "/a=b"},
        {"name": "chat", "path": "org/chat"},
    ]
    assert passed_args.for_the_router(config.engine_args) == {"enable_lora": True}


def test_a_table_in_the_file_and_single_flags_are_one(tmp_path):
    file = tmp_path / "some.yaml"
    file.write_text("engine_args:\n  max_logprobs: 5\n  seed: 1\npools: {decode: {engine_args: {numa_bind: true}}}\n")
    config = load_config(file, {"engine_args.seed": "2", "server_args.tool_call_parser": "hermes"}).config
    assert config.engine_args == {"max_logprobs": 5, "seed": 2}
    assert config.args_of("decode") == {"max_logprobs": 5, "seed": 2, "numa_bind": True}
    assert config.args_of("prefill") == config.engine_args
    assert config.server_args == {"tool_call_parser": "hermes"}


def test_nothing_of_vllm_is_imported_to_judge_a_configuration():
    code = (
        "import sys; from ridgeline.cluster.config.loader import load_config; "
        "load_config(None, {'engine_args.max_logprobs': '5', 'server_args.tool_call_parser': 'hermes'}); "
        "sys.exit(any(name in sys.modules for name in ('vllm', 'torch', 'ray')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


if __name__ == "__main__":
    passed_args.TABLE.write_text(text_of(table()), encoding="utf-8")
