"""lm-eval, by its `local-completions`: log-likelihoods of given answers, and answers up to a stop string."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

URL, MODEL, MODEL_PATH = sys.argv[1:4]
ROWS = [
    {"question": "The capital of France is", "answers": [" Paris", " qqqqq"], "right": 0},
    {"question": "One, two, three,", "answers": [" four", " zebra"], "right": 0},
]


def task(name: str, rows: Path, **own: Any) -> dict[str, Any]:
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "target_delimiter": "",
        **own,
    }


with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": MODEL,
            "base_url": f"{URL}/v1/completions",
            "tokenizer": MODEL_PATH,
            "num_concurrent": 2,
            "max_retries": 1,
            "max_length": 4096,
        },
        tasks=[
            task(
                "choices",
                file,
                output_type="multiple_choice",
                doc_to_choice="{{answers}}",
                doc_to_target="{{right}}",
                metric_list=[{"metric": "acc"}],
            ),
            task(
                "answers",
                file,
                output_type="generate_until",
                doc_to_target="{{answers[right]}}",
                generation_kwargs={"until": ["\n"], "max_gen_toks": 4, "temperature": 0},
                metric_list=[{"metric": "exact_match"}],
            ),
        ],
        task_manager=TaskManager(include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
assert results["results"]["choices"]["acc,none"] == 1.0, results["results"]
said = [sample["resps"][0][0] for sample in results["samples"]["answers"]]
assert len(said) == len(ROWS)
assert all(said)
