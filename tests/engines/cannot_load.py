"""Engines that cannot load, one after the other in this process: `python -m` prints what each of them says as JSON.

Each is the product's own engine, in a process of its own, with a tiny random model that lacks one thing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.engines.one_engine import ENVIRONMENT, RESULT

TOO_MUCH_BYTES = 1 << 46
"""64 TiB, more than a process can map."""


def _json_with(model: Path, file: str, **changes: Any) -> None:
    path = model / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _no_weights(model: Path) -> dict[str, Any]:
    (model / "model.safetensors").unlink()
    return {}


def _cut_weights(model: Path) -> dict[str, Any]:
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    return {}


def _other_shape(model: Path) -> dict[str, Any]:
    _json_with(model, "config.json", intermediate_size=512)
    return {}


def _unknown_quantization(model: Path) -> dict[str, Any]:
    _json_with(model, "config.json", quantization_config={"quant_method": "made_up"})
    return {}


def _unknown_architecture(model: Path) -> dict[str, Any]:
    _json_with(model, "config.json", architectures=["MadeUpForCausalLM"], model_type="made_up")
    return {}


def _too_long(model: Path) -> dict[str, Any]:
    return {"max_model_len": 100_000}


def _too_little_cache(model: Path) -> dict[str, Any]:
    return {"kv_cache_bytes_per_rank": 1 << 16}


def _too_much_cache(model: Path) -> dict[str, Any]:
    return {"kv_cache_bytes_per_rank": TOO_MUCH_BYTES}


def _killed(model: Path) -> dict[str, Any]:
    import psutil

    def kill() -> None:
        me = psutil.Process()
        while True:
            for child in me.children():
                with suppress(psutil.NoSuchProcess):  # the former engine's, which has just ended
                    if "resource_tracker" not in str(child.cmdline()):
                        child.send_signal(signal.SIGKILL)
                        return
            time.sleep(0.001)

    threading.Thread(target=kill, daemon=True).start()
    return {}


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "no weights": _no_weights,
    "cut weights": _cut_weights,
    "other shape": _other_shape,
    "unknown quantization": _unknown_quantization,
    "unknown architecture": _unknown_architecture,
    "too long": _too_long,
    "too little cache": _too_little_cache,
    "too much cache": _too_much_cache,
    "killed": _killed,
}


async def main(folder: Path) -> None:
    from ridgeline.engine.vllm_engine import VllmEngine
    from tests.support.model_families import make_family
    from tests.support.samples import engine_config

    whole = make_family("mistral", folder / "whole")
    for name, spoil in CASES.items():
        model = folder / name.replace(" ", "-")
        shutil.copytree(whole, model)
        common = {"model_path": str(model), "dtype": "float32", "max_model_len": 128}
        common |= {"kv_cache_bytes_per_rank": 32 << 20, "passed": {"skip_tokenizer_init": True}}
        engine = VllmEngine(dataclasses.replace(engine_config("decode"), **(common | spoil(model))))
        try:
            engine.start()
            said = "loaded"
            engine.close()
        except Exception as error:  # noqa: BLE001 - this is what is asked for
            said = f"{type(error).__name__}: {error}"
        print(RESULT + json.dumps({"case": name, "said": said}), flush=True)  # noqa: T201 - for the test


if __name__ == "__main__":
    os.environ |= ENVIRONMENT | {"VLLM_RPC_BASE_PATH": sys.argv[2]}
    asyncio.run(main(Path(sys.argv[1])))
