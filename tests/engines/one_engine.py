"""One engine in this process that hands its KV over to itself: prefill's leg, then decode's, through the connector.

Cheaper than a deployment by far: no Ray, no router, no second copy of the model. Its prefix cache is off, so decode's
blocks are others than prefill's and everything in them has come through the transfer. `python -m` prints one line of
JSON for each model family it is given. `--matrix` tries each with 20 prompts, and asks plain vLLM first.
"""

from __future__ import annotations

import json
import os
import random
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
}
RESULT = "RESULT "
STEP_TOKENS = 256
LONGEST_TOKENS = 1024
LENGTHS = (40, 100, 200, 300, 600)
"""Below and above the models' window, in one step and in several."""
MATRIX_LENGTHS = (1, 2, 3, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 500, 768)
NUM_OUTPUT_TOKENS = 6
DRAFTED_LENGTHS = (1, 31, 32, 33, 100, 255, 257, 600)
DRAFTED_OUTPUT_TOKENS = 40


class OneEngine:
    """Runs one answer at a time, to its end."""

    def __init__(
        self, model_path: Path, *, plain: bool = False, kv: str = "auto", speculation: dict[str, Any] | None = None
    ) -> None:
        """`plain`: as vLLM makes it, without anything of Ridgeline's. `kv`: the number format of the KV cache."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from ridgeline.engine.vllm_engine import _engine_args
        from tests.support.samples import engine_config

        own = {
            "model": str(model_path),
            "dtype": _dtype(model_path),
            "kv_cache_dtype": kv,
            "max_model_len": LONGEST_TOKENS,
            "max_num_batched_tokens": STEP_TOKENS,
            "kv_cache_memory_bytes": 32 << 20,
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
        }
        if speculation:
            own["scheduler_cls"] = "ridgeline.engine.step_scheduler.BoundedScheduler"  # it counts drafts
        config = replace(engine_config("decode"), passed={"speculative_config": speculation} if speculation else {})
        ours = {} if plain else _engine_args(config)
        self._engine = LLMEngine.from_engine_args(EngineArgs(**{**ours, "enforce_eager": True, **own}))
        self._ids = count()
        self._answers: dict[str, list[int]] = {}
        self._told: dict[str, dict[str, Any]] = {}
        self._events: list[Any] = []
        if not plain:
            self._side = self._engine.engine_core.engine_core.scheduler.connector.scheduler
            self._keep_events(self._side)

    def _keep_events(self, side: Any) -> None:
        """They travel with statistics, which nobody reads here."""
        take = side.take_events
        side.take_events = lambda: self._events.extend(take()) or []

    @property
    def drafts(self) -> tuple[float, float]:
        """Tokens drafted and accepted until now."""
        counted = self._side.counters
        return counted.get("drafted_tokens_total", 0.0), counted.get("accepted_tokens_total", 0.0)

    def whole(self, prompt: list[int], wish: Any) -> list[int]:
        """The answer without any hand-off."""
        from ridgeline.engine.request import sampling

        return self._answer(self._add(prompt, sampling.decode_leg(wish, emitted_token_ids=[], has_handoff=False)))

    def split(self, prompt: list[int], wish: Any) -> tuple[list[int], dict[str, Any]]:
        """The answer of both legs, one after the other, and the result of the fetch between them."""
        prefill = self._prefill(prompt, wish)
        first = self._answer(prefill)
        decode = self._decode(prompt, first, wish, handoff=self._told[prefill]["handoff"])
        return [*first, *self._answer(decode)], self._told[decode]["result"]

    def followed(self, prompt: list[int], wish: Any) -> tuple[list[int], dict[str, Any]]:
        """The same, with decode's leg begun after the prompt's first step, on the hand-off announced before it."""
        from ridgeline.engine.connector.messages import FIRST_TOKEN_FOLLOWS

        self._events.clear()
        prefill = self._prefill(prompt, wish)
        while not self._events:
            self._step()
        follows = {"handoff": self._events[0]["handoff"], FIRST_TOKEN_FOLLOWS: True}
        decode = self._decode(prompt, prompt[-1:], wish, **follows)
        return [*self._answer(prefill), *self._answer(decode)], self._told[decode]["result"]

    def _prefill(self, prompt: list[int], wish: Any) -> str:
        from ridgeline.contracts.handoff import new_handoff_id
        from ridgeline.engine.request import sampling

        leg = sampling.prefill_leg(wish, emitted_token_ids=[], resample=False)
        publish = {"do_remote_decode": True, "handoff_id": new_handoff_id()}
        return self._add(prompt, sampling.with_transfer(leg, publish))

    def _decode(self, prompt: list[int], emitted: list[int], wish: Any, **transfer: Any) -> str:
        from ridgeline.engine.request import sampling

        leg = sampling.decode_leg(wish, emitted_token_ids=emitted, has_handoff=True)
        return self._add([*prompt, *emitted], sampling.with_transfer(leg, {"do_remote_prefill": True, **transfer}))

    def _add(self, prompt: list[int], params: Any) -> str:
        name = str(next(self._ids))
        self._answers[name] = []
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def _answer(self, name: str) -> list[int]:
        while name not in self._told:
            self._step()
        return self._answers[name]

    def _step(self) -> None:
        for output in self._engine.step():
            self._answers[output.request_id] += output.outputs[0].token_ids
            if output.finished:
                self._told[output.request_id] = output.kv_transfer_params or {}

    def close(self) -> None:
        """End its threads."""
        self._engine.engine_core.shutdown()


def _dtype(model_path: Path) -> str:
    """Return float32, but where vLLM's kernels want 16 bits: states, quantised weights, and MLA on a CPU with AMX."""
    import torch

    config = json.loads((model_path / "config.json").read_text())
    narrow = "linear_num_key_heads" in config or ("kv_lora_rank" in config and torch.cpu._is_amx_tile_supported())
    return "bfloat16" if narrow or "quantization_config" in config else "float32"


def compare(model_path: Path, lengths: Sequence[int], *, with_plain: bool, kv: str) -> list[dict[str, Any]]:
    """Every prompt whole first, then all of them split: no block holds by chance what the transfer should bring.

    `other` is the answer to a prompt that begins otherwise: where it differs, far tokens matter.
    """
    from vllm.sampling_params import SamplingParams

    wish = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    draw = random.Random(5)
    prompts = [[draw.randrange(3, 500) for _ in range(length)] for length in lengths]
    plain: list[list[int] | None] = [None] * len(prompts)
    if with_plain:
        with closing(OneEngine(model_path, plain=True, kv=kv)) as engine:
            plain = [engine.whole(prompt, wish) for prompt in prompts]
        _clean_up()
    with closing(OneEngine(model_path, kv=kv)) as engine:
        wholes = [engine.whole(prompt, wish) for prompt in prompts]
        others = [engine.whole([7] * 16 + prompt[16:], wish) for prompt in prompts]
        splits = [engine.split(prompt, wish) for prompt in prompts]
        followed = [engine.followed(prompt, wish) for prompt in prompts]
    names = ("length", "prompt", "plain", "whole", "other", "split", "followed")
    columns = zip(lengths, prompts, plain, wholes, others, splits, followed, strict=True)
    return [dict(zip(names, column, strict=True)) for column in columns]


def answer_with(model_path: Path, method: str) -> dict[str, Any]:
    """What an engine answers that drafts by this method, or by none: whole, split, followed; and its drafts in each.

    A draft model is the model itself, an EAGLE head or MTP layer nearly so, so that what they draft is right as long as
    their own KV is.
    """
    from vllm.sampling_params import SamplingParams

    wish = SamplingParams(temperature=0.0, max_tokens=DRAFTED_OUTPUT_TOKENS, ignore_eos=True)
    draw = random.Random(7)
    prompts = [([draw.randrange(3, 500) for _ in range(20)] * 40)[:length] for length in DRAFTED_LENGTHS]
    own = {
        "ngram": {"prompt_lookup_max": 3, "prompt_lookup_min": 1},
        "draft_model": {"model": str(model_path)},
        "eagle": {"model": str(model_path / "eagle")},
        "eagle3": {"model": str(model_path / "eagle3")},
        "mtp": {},
    }
    config = None if method == "none" else {"method": method, "num_speculative_tokens": 3, **own[method]}
    told: dict[str, Any] = {}
    with closing(OneEngine(model_path, speculation=config)) as engine:
        for way in ("whole", "split", "followed"):
            before = engine.drafts
            found = [getattr(engine, way)(prompt, wish) for prompt in prompts]
            told[way] = found if way == "whole" else [token_ids for token_ids, _ in found]
            told[f"{way} drafts"] = [after - had for after, had in zip(engine.drafts, before, strict=True)]
    return told


def _clean_up() -> None:
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


def main(directory: Path, families: list[str], *, matrix: bool, vocabulary_tokens: int, kv: str) -> None:
    """One line for each family: its answers, or the sentence with which it was refused.

    As `llama+ngram` those with drafts, by this method; vLLM makes no second engine in a process that has drafted.
    """
    from tests.support.model_families import make_family

    for family in families:
        line: dict[str, Any] = {"family": family}
        try:
            name, _, method = family.partition("+")
            model = make_family(name, directory / name, vocabulary_tokens)
            line["dtype"] = _dtype(model)
            line["answers"] = (
                answer_with(model, method)
                if method
                else compare(model, MATRIX_LENGTHS if matrix else LENGTHS, with_plain=matrix, kv=kv)
            )
        except Exception as error:  # noqa: BLE001 - the test judges it
            line["refused"] = f"{type(error).__name__}: {error}"
        _clean_up()
        sys.stdout.write(f"{RESULT}{json.dumps(line)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    parser = ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("families", nargs="+")
    parser.add_argument("--matrix", action="store_true")
    parser.add_argument("--vocabulary-tokens", type=int, default=512)
    parser.add_argument("--kv", default="auto", help="kv_cache_dtype")
    main(**vars(parser.parse_args()))
