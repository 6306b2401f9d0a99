"""What servers say of their engines, and in what two of them are not equal.

A difference in any of it can decide a comparison. What a server does not say is "unknown", never a default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx
import msgspec

from ridgeline.loadtest.run.server_metrics import Scrape

UNKNOWN: Final = "unknown"
NOISE: Final = 0.02
BETWEEN: Final = " and "
"""Stands between what several engines of one variant say."""
Found = Mapping[str, Any]


class ServerFacts(msgspec.Struct, frozen=True):
    """The settings of a server's engines, each as a text, "unknown" if it does not say."""

    server: str = UNKNOWN
    """Ridgeline, vLLM or SGLang; may differ."""
    engine: str = UNKNOWN
    """The engine and its version."""
    dtype: str = UNKNOWN
    quantisation: str = UNKNOWN
    block_size: str = UNKNOWN
    prefix_caching: str = UNKNOWN
    kv_cache_dtype: str = UNKNOWN
    kv_cache_memory_bytes: str = UNKNOWN
    kv_blocks: str = UNKNOWN
    """Blocks in the KV cache of one engine."""
    max_num_seqs: str = UNKNOWN
    token_budget: str = UNKNOWN
    """max_num_batched_tokens."""
    graphs: str = UNKNOWN
    """Graphs and compilation: off if the engine runs eagerly."""
    attention: str = UNKNOWN
    tensor_parallel_size: str = UNKNOWN
    devices: str = UNKNOWN

    def completed_by(self, other: ServerFacts) -> ServerFacts:
        """Return these facts, with those of `other` where these are unknown."""
        theirs = msgspec.structs.asdict(other)
        mine = msgspec.structs.asdict(self)
        return ServerFacts(**{name: theirs[name] if value == UNKNOWN else value for name, value in mine.items()})


NAMES: Final[Mapping[str, str]] = {
    "dtype": "dtype",
    "quantisation": "quantisation",
    "block_size": "tokens in a KV block",
    "prefix_caching": "prefix caching",
    "kv_cache_dtype": "dtype of the KV cache",
    "kv_cache_memory_bytes": "bytes of KV cache",
    "kv_blocks": "KV blocks",
    "token_budget": "token budget",
    "graphs": "graphs and compilation",
    "attention": "attention backend",
    "tensor_parallel_size": "tensor parallelism",
    "devices": "devices",
}
"""How sentences call the facts that must be equal. Engine, version and places may differ: they are what is compared."""


def together(engines: Sequence[ServerFacts]) -> ServerFacts:
    """Return the facts of one variant: in each, all that its engines say."""
    names = ServerFacts.__struct_fields__
    return ServerFacts(**{name: _all({getattr(each, name) for each in engines} - {UNKNOWN}) for name in names})


def unequal(variants: Mapping[str, ServerFacts]) -> list[str]:
    """Say in which facts variants differ, a sentence each; empty if all that is known is equal.

    Sizes of KV caches that differ by less than `NOISE` are equal: engines that fill a GPU's memory find a little more
    or less of it in each start.
    """
    said = []
    for name, words in NAMES.items():
        known = {label: getattr(facts, name) for label, facts in variants.items() if getattr(facts, name) != UNKNOWN}
        if not _are_equal(set(known.values())):
            values = ", ".join(f"{value} in {label}" for label, value in known.items())
            said.append(f"{words[0].upper()}{words[1:]}: {values}")
    return said


def unknown(variants: Mapping[str, ServerFacts]) -> list[str]:
    """Say what each variant does not tell of its engines, a sentence each."""
    missing = {
        label: [words for name, words in NAMES.items() if getattr(facts, name) == UNKNOWN]
        for label, facts in variants.items()
    }
    return [f"{label} does not publish: {', '.join(words)}" for label, words in missing.items() if words]


def _are_equal(values: set[str]) -> bool:
    if len(values) < 2:
        return True
    try:
        numbers = [float(value) for each in values for value in each.split(BETWEEN)]
    except ValueError:
        return False
    return max(numbers) <= (1 + NOISE) * min(numbers)


async def ask_facts(http: httpx.AsyncClient, read: Scrape | None) -> ServerFacts:
    """Ask a server for its facts; `read` is its /metrics, scraped with `foreign`. A page that is closed tells nothing.

    vLLM has /version, and /server_info with VLLM_SERVER_DEV_MODE=1 (`vllm/entrypoints/serve/dev/server_info`). SGLang
    has /server_info, formerly /get_server_info (`sglang/srt/entrypoints/http_server.py`).
    """
    version = await _json(http, "/version")
    info = await _json(http, "/server_info?config_format=json") or await _json(http, "/get_server_info")
    return facts_of(version, info, read)


async def _json(http: httpx.AsyncClient, path: str) -> Found:
    try:
        response = await http.get(path, timeout=30.0)
        is_there = response.status_code == httpx.codes.OK
        return msgspec.json.decode(response.content, type=dict[str, Any]) if is_there else {}
    except (httpx.HTTPError, ValueError):
        return {}


def facts_of(version: Found, info: Found, read: Scrape | None) -> ServerFacts:
    """Return what /version, /server_info and /metrics say together; an empty mapping is a page that is not there."""
    gauges = {} if read is None else read.gauges
    names = {name for name, _ in (*gauges, *(() if read is None else read.counters))}
    if "tp_size" in info:
        return _sglang(info)
    labels = next((dict(found) for name, found in gauges if name == "vllm:cache_config_info"), {})
    config = info.get("vllm_config")  # a text where a proxy drops the query that asks for JSON
    vllm = _vllm(version, config if isinstance(config, dict) else {}, labels)
    if any(name.startswith("ridgeline_") for name in names):
        blocks = {f"{value:g}" for (name, _), value in gauges.items() if name == "ridgeline_kv_blocks"}
        places = {f"{value:g}" for (name, _), value in gauges.items() if name == "ridgeline_max_num_seqs"}
        devices = {dict(found)["hardware"] for name, found in gauges if name == "ridgeline_hardware_info"}
        own = ServerFacts("Ridgeline", kv_blocks=_all(blocks), max_num_seqs=_all(places), devices=_all(devices))
        return own.completed_by(vllm)
    if labels or "vllm_config" in info or any(name.startswith("vllm:") for name in names):
        return vllm
    return ServerFacts()


def _vllm(version: Found, config: Found, labels: Found) -> ServerFacts:
    """Return the facts in a VllmConfig as JSON, else in the labels of `vllm:cache_config_info`, a CacheConfig."""
    cache = config.get("cache_config") or labels
    model, scheduler, parallel, compiled, attention, device = (
        config.get(f"{part}_config") or {}
        for part in ("model", "scheduler", "parallel", "compilation", "attention", "device")
    )
    graphs = UNKNOWN
    if "enforce_eager" in model:
        mode, kind = compiled.get("mode"), compiled.get("cudagraph_mode")
        graphs = "off" if model["enforce_eager"] else f"compilation mode {mode}, CUDA graph mode {kind}"
    return ServerFacts(
        server="vLLM",
        engine=f"vLLM {version['version']}" if "version" in version else UNKNOWN,
        dtype=_text(model, "dtype").removeprefix("torch."),
        quantisation=_text(model, "quantization", none="none"),
        block_size=_text(cache, "block_size"),
        prefix_caching=_text(cache, "enable_prefix_caching"),
        kv_cache_dtype=_text(cache, "cache_dtype"),
        kv_cache_memory_bytes=_text(cache, "kv_cache_memory_bytes"),
        kv_blocks=_text(cache, "num_gpu_blocks"),
        max_num_seqs=_text(scheduler, "max_num_seqs"),
        token_budget=_text(scheduler, "max_num_batched_tokens"),
        graphs=graphs,
        attention=_text(attention, "backend"),  # null: chosen by the platform, and not said
        tensor_parallel_size=_text(parallel, "tensor_parallel_size"),
        devices=_text(device, "device"),
    )


def _sglang(info: Found) -> ServerFacts:
    """Return the facts in SGLang's ServerArgs; without `page_size` given, a page is one token."""
    graphs = info.get("disable_cuda_graph")
    radix = info.get("disable_radix_cache")
    page, tokens = info.get("page_size") or 1, info.get("max_total_num_tokens")
    return ServerFacts(
        server="SGLang",
        engine=f"SGLang {info['version']}" if "version" in info else UNKNOWN,
        dtype=_text(info, "dtype"),
        quantisation=_text(info, "quantization", none="none"),
        block_size=str(page),
        prefix_caching=UNKNOWN if radix is None else str(not radix),
        kv_cache_dtype=_text(info, "kv_cache_dtype"),
        kv_blocks=UNKNOWN if tokens is None else str(tokens // page),
        max_num_seqs=_text(info, "max_running_requests"),
        token_budget=_text(info, "chunked_prefill_size"),
        graphs=UNKNOWN if graphs is None else "off" if graphs else "CUDA graphs",
        attention=_text(info, "attention_backend"),
        tensor_parallel_size=_text(info, "tp_size"),
        devices=_text(info, "device"),
    )


def _text(found: Found, key: str, none: str = UNKNOWN) -> str:
    if key not in found:
        return UNKNOWN
    value = found[key]
    return none if value in (None, "None") else str(value)


def _all(values: set[str]) -> str:
    return BETWEEN.join(sorted(values)) or UNKNOWN
