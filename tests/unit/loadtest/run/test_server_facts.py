"""What a vLLM 0.32 on CPU and an SGLang say of themselves, and in which sentences two servers are not equal."""

import json
from pathlib import Path

import httpx
import msgspec

from ridgeline.loadtest.run.server_facts import (
    NAMES,
    UNKNOWN,
    ServerFacts,
    ask_facts,
    facts_of,
    together,
    unequal,
    unknown,
)
from ridgeline.loadtest.run.server_metrics import parse_metrics

PAGES = Path(__file__).parent / "pages"
"""Of vLLM 0.32 on CPU, serving SmolLM2-135M with three requests behind it; cut to the series that matter."""
METRICS = parse_metrics((PAGES / "vllm_0_32_metrics.txt").read_text(), foreign=True)
INFO = json.loads((PAGES / "vllm_0_32_server_info.json").read_text())
VLLM = facts_of({"version": "0.32.0"}, INFO, METRICS)
SGLANG = {
    "version": "0.5.13",
    "tp_size": 2,
    "dtype": "bfloat16",
    "quantization": None,
    "page_size": 16,
    "disable_radix_cache": False,
    "kv_cache_dtype": "auto",
    "max_total_num_tokens": 160000,
    "device": "cuda",
    "max_running_requests": 64,
    "chunked_prefill_size": 8192,
    "disable_cuda_graph": False,
    "attention_backend": "flashinfer",
}


def test_a_vllm_in_dev_mode_says_nearly_all():
    assert (
        ServerFacts(
            server="vLLM",
            engine="vLLM 0.32.0",
            dtype="bfloat16",
            quantisation="none",
            block_size="32",
            prefix_caching="True",
            kv_cache_dtype="auto",
            kv_cache_memory_bytes="1073741824",
            kv_blocks="1456",
            max_num_seqs="16",
            token_budget="2048",
            graphs="off",
            tensor_parallel_size="1",
            devices="cpu",
        )
        == VLLM
    )
    assert VLLM.attention == UNKNOWN


def test_any_other_vllm_says_its_cache_in_a_series():
    usual = facts_of({"version": "0.32.0"}, {}, METRICS)
    for name in ("engine", "block_size", "prefix_caching", "kv_cache_dtype", "kv_cache_memory_bytes", "kv_blocks"):
        assert getattr(usual, name) == getattr(VLLM, name)
    assert (usual.server, usual.dtype, usual.graphs, usual.token_budget) == ("vLLM", *[UNKNOWN] * 3)


def test_a_configuration_that_a_proxy_gives_as_text_tells_nothing():
    assert facts_of({}, {"vllm_config": "model='m', dtype=torch.bfloat16"}, METRICS) == facts_of({}, {}, METRICS)


def test_a_sglang_says_its_arguments():
    found = facts_of({}, SGLANG, None)
    assert (found.server, found.engine, found.kv_blocks, found.prefix_caching) == (
        "SGLang",
        "SGLang 0.5.13",
        "10000",
        "True",
    )
    assert (found.graphs, found.attention, found.quantisation) == ("CUDA graphs", "flashinfer", "none")
    assert facts_of({}, SGLANG | {"page_size": None, "disable_cuda_graph": True}, None).graphs == "off"


def test_a_ridgeline_says_its_blocks_places_and_hardware_and_its_vllm():
    page = """# TYPE ridgeline_kv_blocks gauge
ridgeline_kv_blocks{pool="decode",worker="0"} 512
ridgeline_kv_blocks{pool="prefill",worker="1"} 256
# TYPE ridgeline_max_num_seqs gauge
ridgeline_max_num_seqs{pool="decode",worker="0"} 16
# TYPE ridgeline_hardware_info gauge
ridgeline_hardware_info{pool="decode",hardware="h100-sxm",source="measured"} 1
"""
    found = facts_of({"version": "0.32.0"}, {}, parse_metrics(page))
    assert (found.server, found.engine, found.kv_blocks) == ("Ridgeline", "vLLM 0.32.0", "256 and 512")
    assert (found.max_num_seqs, found.devices) == ("16", "h100-sxm")
    configured = ServerFacts(dtype="bfloat16", kv_blocks="9")
    whole = found.completed_by(configured)
    assert (whole.dtype, whole.kv_blocks) == ("bfloat16", "256 and 512")


def test_only_what_differs_or_is_not_said_is_named():
    known = ServerFacts(**dict.fromkeys(ServerFacts.__struct_fields__, "x"))
    assert unequal({"a": known, "b": msgspec.structs.replace(known, server="y")}) == []
    other = msgspec.structs.replace(known, kv_cache_dtype="fp8", attention=UNKNOWN)
    assert unequal({"a": known, "b": other}) == ["Dtype of the KV cache: x in a, fp8 in b"]
    assert unknown({"a": known, "b": other}) == ["b does not publish: attention backend"]
    assert set(NAMES) == set(ServerFacts.__struct_fields__) - {"server", "engine", "max_num_seqs"}


def test_of_several_engines_all_that_they_say_is_told_and_what_differs_is_not_equal_to_one_of_them():
    small, large = ServerFacts(dtype="float32", token_budget="2048"), ServerFacts(token_budget="8192")
    pd = together([ServerFacts(), small, large])
    assert (pd.dtype, pd.token_budget, pd.attention) == ("float32", "2048 and 8192", UNKNOWN)
    assert unequal({"pd": pd, "plain": large}) == ["Token budget: 2048 and 8192 in pd, 8192 in plain"]
    assert unequal({"pd": pd, "again": together([large, small])}) == []
    filled = together([ServerFacts(kv_blocks="1000"), ServerFacts(kv_blocks="1010")])
    assert unequal({"filled": filled, "other": ServerFacts(kv_blocks="1005")}) == []
    assert unequal({"filled": filled, "other": ServerFacts(kv_blocks="1100")})


async def test_closed_pages_pages_for_people_and_former_addresses_are_read_as_far_as_they_tell():
    answers = {
        "/version": httpx.Response(401),
        "/server_info": httpx.Response(200, text="<html>"),
        "/get_server_info": httpx.Response(200, json=SGLANG),
    }

    def answer(request):
        return answers.get(request.url.path, httpx.Response(404))

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://here") as http:
        assert await ask_facts(http, None) == facts_of({}, SGLANG, None)
        answers.clear()
        assert await ask_facts(http, METRICS) == facts_of({}, {}, METRICS)
        assert await ask_facts(http, None) == ServerFacts()
