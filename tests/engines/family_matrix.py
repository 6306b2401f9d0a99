"""Each family of models beside plain vLLM: through one engine that hands over to itself, and through `ridgeline serve`.

`python -m tests.engines.family_matrix [--served] [FAMILY ...]` runs them, for 20 s each or two minutes, and writes
docs/results/families.json, of which the table in docs/how-to/serve.md is made.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec

from ridgeline.cluster.model_store import DEFAULT_MODEL_NAME, prepare_model
from ridgeline.engine.connector.transferable_models import why_unsupported
from tests.engines.one_engine import NUM_OUTPUT_TOKENS, RESULT, STEP_TOKENS
from tests.engines.serve_process import RIDGELINE, body
from tests.engines.served import Deployed, Stream, deployed_by_serve
from tests.support.model_families import FAMILIES, Proof, proofs, write_proofs
from tests.support.ties import is_tie

REPOSITORY = Path(__file__).parents[2]
MODES = ("disaggregated", "colocated", "adaptive")
LOST = "after a lost worker"
EVERYWHERE = (*MODES, LOST)
POOLS = ("prefill", "decode", "colocated")
RANKED = {"logprobs": 20, "return_tokens_as_token_ids": True}
TO_SERVE = ("--matrix", "--vocabulary-tokens=49152")
"""With the tokens of the default model, whose tokenizer it gets."""
LOST_PROMPT_TOKENS, LOST_ANSWER_TOKENS = 129, 800


def in_one_engine(models: Path, *families: str, options: tuple[str, ...] = ("--matrix",)) -> dict[str, dict[str, Any]]:
    """What each family came to, in one process of its own."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.engines.one_engine", str(models), *options, *families],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        timeout=90 + 120 * len(families),
    )
    lines = [json.loads(line.removeprefix(RESULT)) for line in ran.stdout.splitlines() if line.startswith(RESULT)]
    assert [line["family"] for line in lines] == list(families), ran.stdout + ran.stderr
    return {line["family"]: line for line in lines}


def proof_of(line: dict[str, Any]) -> Proof:
    """Count the answers that are plain vLLM's."""
    answers = line.get("answers", [])
    return Proof(
        family=line["family"],
        dtype=line.get("dtype", ""),
        prompts=len(answers),
        colocated=sum(answer["whole"] == answer["plain"] for answer in answers),
        handed_over=sum(answer["split"][0] == answer["followed"][0] == answer["plain"] for answer in answers),
        bytes_moved=sum(answer["split"][1]["num_bytes"] for answer in answers),
        far_tokens_matter=sum(answer["other"] != answer["whole"] for answer in answers),
        failed=line.get("refused", ""),
        date=datetime.now(UTC).date().isoformat(),
    )


def served(
    models: Path, line: dict[str, Any], more: Mapping[str, str] = {}, columns: Sequence[str] = EVERYWHERE
) -> dict[str, int]:
    """Serve it with `more` settings; return how many answers of each mode, and after a lost engine, are plain vLLM's.

    MODEL in a setting is the folder of the model.

    Up to a tie: 16 bits have some wherever a prompt is computed in other chunks, as that of a lost engine is. Of that
    engine the answer is compared with the same one undisturbed.
    """
    model = models / line["family"]
    for file in prepare_model(DEFAULT_MODEL_NAME).iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges", "chat_template")):
            shutil.copy(file, model)
    settings = {
        "mode": columns[0],
        "model.path": str(model),
        "model.dtype": line["dtype"],
        "model.max_model_len": "1024",
        "model.served_model_name": DEFAULT_MODEL_NAME,
        "ray.share_cores": "true",
        "router.min_remote_prefill_tokens": "0",
        **in_each_pool(kv_cache_memory_bytes="128 MiB", max_num_seqs="8", max_num_batched_tokens=str(STEP_TOKENS)),
    }
    if why_unsupported(json.loads((model / "config.json").read_text()), on_cpu=True, prefix_caching=True) is not None:
        settings["engine_args.enable_prefix_caching"] = "false"
    equal, modes = {}, [mode for mode in MODES if mode in columns]
    settings |= {name: value.replace("MODEL", str(model)) for name, value in more.items()}
    with deployed_by_serve(settings=settings) as deployed:
        for mode in modes:
            _change(deployed, mode)
            httpx.post(
                f"{deployed.url}/ridgeline/forget_prefixes", timeout=60
            ).raise_for_status()  # as plain vLLM began
            equal[mode] = sum(_agrees(deployed, one, line["dtype"]) for one in line["answers"])
        if LOST not in columns:
            return equal
        _change(deployed, modes[0])
        [prompt] = [one["prompt"] for one in line["answers"] if one["length"] == LOST_PROMPT_TOKENS]
        whole = _choice(deployed, prompt, LOST_ANSWER_TOKENS, **RANKED)
        # Looked up before: ranks that wait take all of the cores, so that a question may take as long as the answer.
        [engine] = [deployed.engine(row["worker"]) for row in deployed.workers().values() if row["pool"] == "decode"]
        stream = Stream(deployed.url, LOST_ANSWER_TOKENS, prompt=prompt, temperature=0, return_token_ids=True)
        engine.kill()
        choices = [choice for event in stream.events() for choice in event["choices"]]
        went_on = [token for choice in choices for token in choice["token_ids"]]
        equal[LOST] = int(_same_but_for_a_tie(whole, went_on, line["dtype"]))
        counted = deployed.metrics()
    assert counted.sum("ridgeline_retries_total", state="decoding") > 0, "no answer was moved"
    if "engine_args.speculative_config" in more:
        assert counted.sum("ridgeline_accepted_tokens_total") > 0, "no draft was right: its answers show nothing"
    return equal


def in_each_pool(**settings: str) -> dict[str, str]:
    """These settings of all pools."""
    return {f"pools.{pool}.{name}": value for pool in POOLS for name, value in settings.items()}


def _change(deployed: Deployed, mode: str) -> None:
    subprocess.run([str(RIDGELINE), "mode", mode, "--url", deployed.url], timeout=120, check=True)


def _agrees(deployed: Deployed, one: dict[str, Any], dtype: str) -> bool:
    """Return whether the answer to a prompt is plain vLLM's, up to a tie: the first other token is as good a one."""
    ours, plain = _choice(deployed, one["prompt"], NUM_OUTPUT_TOKENS)["token_ids"], one["plain"]
    place = next((place for place, pair in enumerate(zip(ours, plain, strict=True)) if len({*pair}) > 1), None)
    if place is None:
        return True
    top = _choice(deployed, one["prompt"] + plain[:place], 1, **RANKED)["logprobs"]["top_logprobs"][0]
    return all(_is_tie(top, token, dtype) for token in (ours[place], plain[place]))


def _same_but_for_a_tie(whole: dict[str, Any], token_ids: list[int], dtype: str) -> bool:
    """Return whether this is the whole answer, at least up to a tie: what comes after one is another answer."""
    for place, (one, other) in enumerate(zip(whole["token_ids"], token_ids, strict=True)):
        if one != other:
            top = whole["logprobs"]["top_logprobs"][place]
            return _is_tie(top, other, dtype)
    return True


def _is_tie(top: dict[str, float], token: int, dtype: str) -> bool:
    behind_nat = max(top.values()) - top.get(f"token_id:{token}", -math.inf)
    sys.stdout.write(f"token {token} is {behind_nat:.3f} nat behind: {top}\n")
    return is_tie(behind_nat, dtype)


def _choice(deployed: Deployed, prompt: list[int], tokens: int, **fields: Any) -> dict[str, Any]:
    request = {**body(tokens), "prompt": prompt, "temperature": 0, "return_token_ids": True, **fields}
    reply = httpx.post(f"{deployed.url}/v1/completions", json=request, timeout=300)
    assert reply.is_success, reply.text
    return dict(reply.json()["choices"][0])


def main(families: list[str], *, with_serve: bool) -> None:
    """Run them and write what they came to."""
    known = proofs()
    for family in families or [family.key for family in FAMILIES]:
        with tempfile.TemporaryDirectory() as name:
            line = in_one_engine(Path(name), family, options=TO_SERVE if with_serve else ("--matrix",))[family]
            proof = proof_of(line)
            if with_serve and not proof.failed:
                proof = msgspec.structs.replace(proof, served=served(Path(name), line))
        known[family] = proof
        sys.stdout.write(f"{proof}\n")
        sys.stdout.flush()
        write_proofs(known)


if __name__ == "__main__":
    main([one for one in sys.argv[1:] if one != "--served"], with_serve="--served" in sys.argv)
