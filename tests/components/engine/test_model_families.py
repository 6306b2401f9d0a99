"""Models whose layers are not a Llama's: right through the hand-over.

Each is tiny and random; one engine hands over to itself (`one_engine.py`), so all of them take half a minute.
`tests/engines/family_matrix.py` tries every family, with more prompts and served.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.family_matrix import POOLS, TO_SERVE, in_one_engine, proof_of, served
from tests.engines.one_engine import LENGTHS, NUM_OUTPUT_TOKENS

STEADY = ("gemma3", "mistral", "qwen3_next", "deepseek_mla")
"""A group of each kind: every token, windows, windows only, states, latent vectors."""


def right(line: dict[str, Any]) -> None:
    """Each answer is that of the engine alone, and everything came through the transfer."""
    assert "refused" not in line, line["refused"]
    answers = line["answers"]
    assert len(answers) == len(LENGTHS)
    for answer in answers:
        assert len(answer["whole"]) == NUM_OUTPUT_TOKENS
        for token_ids, transfer in (answer["split"], answer["followed"]):
            assert (answer["length"], token_ids) == (answer["length"], answer["whole"])
            assert (transfer["outcome"], transfer["num_bytes"] > 0) == ("ok", True)
    changed = [answer["length"] for answer in answers if answer["other"] != answer["whole"]]
    assert len(changed) >= 2, "attention hardly matters in this model: its answers show nothing"


@pytest.mark.proves(("sliding windows", "recurrent states", "latent KV (MLA)"), "disaggregated")
@pytest.mark.slow
def test_a_handed_over_answer_is_that_of_the_engine_alone(tmp_path: Path, subtests: pytest.Subtests):
    for family, line in in_one_engine(tmp_path, *STEADY, options=()).items():
        with subtests.test(family):
            right(line)


@pytest.mark.long  # tests/engines/test_speculation.py serves by n-grams
@pytest.mark.parametrize(
    ("family", "method", "right"),
    [
        pytest.param(
            *("llama", "draft_model", 0.9),
            marks=pytest.mark.proves("drafts by a small model", ("colocated", "disaggregated")),
        ),
        pytest.param(
            *("llama-eagle", "eagle", 0.7),
            marks=pytest.mark.proves("drafts by EAGLE, MTP", ("colocated", "disaggregated")),
        ),
        ("llama-eagle3", "eagle3", 0.0),
        pytest.param(
            *("glm4_moe-mtp", "mtp", 0.6),
            marks=pytest.mark.proves("drafts by EAGLE, MTP", ("colocated", "disaggregated")),
        ),
        pytest.param(
            *("llama", "ngram", 0.0), marks=pytest.mark.proves("drafts by n-grams", ("colocated", "disaggregated"))
        ),
        ("gemma3", "ngram", 0.0),
    ],
)
def test_speculation_changes_no_token_of_a_handed_over_answer(tmp_path: Path, family: str, method: str, right: float):
    """`right`: the least part of the drafts that is accepted. As many are after a hand-off, or some KV is not there."""
    told = {}
    for name in (f"{family}+none", f"{family}+{method}"):
        told[name] = in_one_engine(tmp_path, name, options=())[name]
        assert "refused" not in told[name], told[name]["refused"]
    plain, drafts = (line["answers"] for line in told.values())
    accepts = {}
    for way in ("whole", "split", "followed"):
        assert drafts[way] == plain["whole"], way
        drafted, accepted = drafts[f"{way} drafts"]
        assert right * drafted < accepted <= drafted, way
        accepts[way] = accepted / drafted
    assert method == "ngram" or min(accepts.values()) > 0.9 * accepts["whole"], accepts


@pytest.mark.long  # once in some fifty runs vLLM's answer without any hand-off is another one: gpt_oss on CPUs
def test_gpt_oss_is_handed_over_too(tmp_path: Path):
    right(in_one_engine(tmp_path, "gpt_oss", options=())["gpt_oss"])


LOOK_UP = "{method: ngram, num_speculative_tokens: 3, prompt_lookup_min: 1, prompt_lookup_max: 3}"
NGRAM = {"engine_args.speculative_config": LOOK_UP}
DRAFT_MODEL, EAGLE, MTP = (
    {"engine_args.speculative_config": f"{{method: {method}, num_speculative_tokens: 3}}"}
    for method in ("draft_model, model: MODEL", "eagle, model: MODEL/eagle", "mtp")
)
EVERYWHERE = ("disaggregated", "colocated", "adaptive", "after a lost worker")
FP8_KV = {"engine_args.kv_cache_dtype": "fp8"}
RANKS = {f"pools.{pool}.{key}": "2" for pool in POOLS for key in ("tensor_parallel_size", "cores_per_worker")}
FEWER_RANKS = RANKS | {"pools.decode.tensor_parallel_size": "1", "pools.decode.cores_per_worker": "1"}
FIXED = ("disaggregated", "colocated")
"""Latents are in 16 bits. Computed in other chunks they differ by more than a tie, in plain vLLM too."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "settings", "columns"),
    [
        pytest.param("gemma3", {}, EVERYWHERE, id="windows", marks=pytest.mark.proves("sliding windows", EVERYWHERE)),
        pytest.param(
            "granite4h", {}, EVERYWHERE, id="states", marks=pytest.mark.proves("recurrent states", EVERYWHERE)
        ),
        pytest.param("deepseek_mla", {}, FIXED, id="MLA", marks=pytest.mark.proves("latent KV (MLA)", FIXED)),
        pytest.param("llama-awq", {}, EVERYWHERE, id="AWQ", marks=pytest.mark.proves("quantised weights", EVERYWHERE)),
        pytest.param(
            "llama", NGRAM, EVERYWHERE, id="n-grams", marks=pytest.mark.proves("drafts by n-grams", EVERYWHERE)
        ),
        pytest.param(
            *("llama", DRAFT_MODEL, EVERYWHERE),
            id="draft-model",
            marks=pytest.mark.proves("drafts by a small model", EVERYWHERE),
        ),
        pytest.param(
            *("llama-eagle", EAGLE, EVERYWHERE),
            id="EAGLE",
            marks=pytest.mark.proves("drafts by EAGLE, MTP", EVERYWHERE),
        ),
        pytest.param(
            *("llama", FP8_KV, EVERYWHERE),
            id="FP8-KV",
            marks=[
                pytest.mark.proves("FP8 KV cache", EVERYWHERE),
                pytest.mark.skipif(
                    not torch.cpu._is_avx512_supported(), reason="vLLM's kernels for FP8 KV need AVX-512 or AMX"
                ),
            ],
        ),
        pytest.param(
            *("gemma3", RANKS, EVERYWHERE),
            id="windows-on-ranks",
            marks=pytest.mark.proves("tensor parallel, equal ranks", EVERYWHERE),
        ),
        pytest.param("gemma3", FEWER_RANKS, ("disaggregated",), id="windows-on-fewer-ranks"),
        pytest.param("granite4h", RANKS, EVERYWHERE, id="states-on-ranks"),
        pytest.param(
            *("glm4_moe-mtp", MTP, EVERYWHERE), id="MTP", marks=pytest.mark.proves("drafts by EAGLE, MTP", EVERYWHERE)
        ),
    ],
)
def test_a_served_answer_is_plain_vllms_in_every_mode_and_after_a_lost_worker(
    tmp_path: Path, family: str, settings: dict[str, str], columns: tuple[str, ...]
):
    kv = settings.get("engine_args.kv_cache_dtype", "auto")
    line = in_one_engine(tmp_path, family, options=(*TO_SERVE, f"--kv={kv}"))[family]
    prompts = proof_of(line).prompts
    equal = served(tmp_path, line, settings, columns)
    assert equal == {column: 1 if "lost" in column else prompts for column in columns}
