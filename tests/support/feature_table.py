"""The table of features in docs/how-to/serve.md: a test that proves a cell, the check that refuses it, or "not tried".

A check refuses what cannot be right ("refused"), or what has not run and may well be ("has not run").

A test says what it proves by `@pytest.mark.proves(features, columns)`: one name, several, or a table of its module by
whose keys it is parametrized. It must show that answers are right, not only that they come. Tests are read, not run.
`python -m tests.support.feature_table` writes the table again.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ridgeline.cluster.config.loader import ConfigError, load_config
from ridgeline.engine import passed_args, speculation
from ridgeline.engine.connector.transferable_models import why_unsupported
from ridgeline.router.front.request_fields import REFUSED as REFUSED_FIELDS

REPOSITORY: Final = Path(__file__).parents[2]
PAGE: Final = REPOSITORY / "docs" / "how-to" / "serve.md"
TABLE: Final = re.compile(r"(?<=<!-- features -->\n).*(?=<!-- /features -->)", re.DOTALL)
SPLIT: Final = ("disaggregated", "adaptive")
"""The modes in which KV is handed over."""
ONE_ENGINE: Final = ("colocated", "after a lost worker")
"""Where one engine makes the answer, or what is left of it."""
COLUMNS: Final = ("colocated", *SPLIT, "after a lost worker")
FEATURES: Final = (
    "greedy answers, whole and streamed",
    "seeds, `top_p`, `top_k`, `min_p`",
    "penalties, `logit_bias`, `bad_words`",
    "stop strings and tokens, `min_tokens`",
    "log-probabilities of the answer",
    "log-probabilities of the prompt, `echo`",
    "several answers (`n`)",
    "JSON schema, regex, grammar, choice",
    "structural tags",
    "forced and strict tools",
    "reasoning parsers",
    "chat",
    "`/v1/responses`, `/v1/messages`",
    "beam search",
    "images, audio, video",
    "embeddings, scores, rewards",
    "sliding windows",
    "recurrent states",
    "latent KV (MLA)",
    "models with an encoder",
    "LoRA adapters from the start",
    "LoRA adapters at run time",
    "drafts by n-grams",
    "drafts by a small model",
    "drafts by EAGLE, MTP",
    "drafts by Medusa and others",
    "drafts beside LoRA adapters",
    "drafts for recurrent states",
    "cached prefixes",
    "sequences that vLLM preempts",
    "prompts of 32,000 tokens",
    "later turns fetch KV from decode",
    "tensor parallel, equal ranks",
    "tensor parallel, unequal ranks",
    "pipeline parallel",
    "expert parallel on CPUs",
    "quantised weights",
    "FP8 KV cache",
)
WITHOUT: Final = dict.fromkeys(
    ("later turns fetch KV from decode", "tensor parallel, unequal ranks"), ("colocated", "adaptive")
)
"""The columns in which a feature has no meaning: all workers are alike there, and each serves what it has cached."""
CANNOT: Final = "refused"
HAS_NOT_RUN: Final = "has not run"


def _of_drafts(config: dict[str, object]) -> str:
    [sentence] = speculation.problems(f"engine_args.{speculation.ARGUMENT}", config, one_pool=False)
    return sentence


def _of_configuration(**settings: str) -> str:
    try:
        load_config(None, {name.replace("__", "."): value for name, value in settings.items()})
    except ConfigError as error:
        [sentence] = error.problems
        return sentence
    raise AssertionError(f"{settings} is accepted")


def _of_argument(name: str) -> str:
    reason = passed_args.why_refused(name)
    assert reason is not None, f"{name} is accepted"
    return f"{reason[0].upper()}{reason[1:]}."


def _of_model(config: dict[str, object], *, speculates: bool = False) -> str:
    reason = why_unsupported(config, on_cpu=False, prefix_caching=True, speculates=speculates)
    assert reason is not None, f"{config} is accepted"
    return f"The model cannot be served: {reason}."


DRAFTS: Final = '{"method": "ngram", "num_speculative_tokens": 3}'
REFUSALS: Final[dict[str, tuple[Callable[[], str], dict[str, Sequence[str]]]]] = {
    "beam search": (
        lambda: f"`use_beam_search` gets 400: {REFUSED_FIELDS['use_beam_search'].sentence}.",
        {CANNOT: COLUMNS},
    ),
    "images, audio, video": (lambda: _of_argument("limit_mm_per_prompt"), {CANNOT: COLUMNS}),
    "embeddings, scores, rewards": (lambda: _of_argument("runner"), {CANNOT: COLUMNS}),
    "models with an encoder": (lambda: _of_model({"is_encoder_decoder": True}), {CANNOT: COLUMNS}),
    "drafts by Medusa and others": (
        lambda: _of_drafts({"method": "medusa", "num_speculative_tokens": 3}),
        {HAS_NOT_RUN: COLUMNS},
    ),
    "drafts beside LoRA adapters": (
        lambda: _of_configuration(
            mode="colocated", engine_args__enable_lora="true", engine_args__speculative_config=DRAFTS
        ),
        {HAS_NOT_RUN: COLUMNS},
    ),
    "drafts for recurrent states": (
        lambda: _of_model({"linear_num_key_heads": 2}, speculates=True),
        {CANNOT: SPLIT},
    ),
    "expert parallel on CPUs": (
        lambda: _of_configuration(
            mode="colocated",
            engine_args__enable_expert_parallel="true",
            pools__colocated__tensor_parallel_size="2",
            pools__colocated__cores_per_worker="2",
        ),
        {CANNOT: COLUMNS},
    ),
    "pipeline parallel": (
        lambda: _of_argument("pipeline_parallel_size"),
        {CANNOT: SPLIT, HAS_NOT_RUN: ONE_ENGINE},
    ),
}
"""The sentence of the check that refuses a feature, and the columns in which it does, by what that means."""


@dataclass(frozen=True)
class Proof:
    """One cell, and the test that proves it."""

    feature: str
    column: str
    file: str
    test: str

    def __str__(self) -> str:
        return f"[`{self.file}`](../../{self.file}): {self.test.removeprefix('test_').replace('_', ' ')}."


def proofs() -> list[Proof]:
    """Read what all tests of the tree say that they prove."""
    files = sorted((REPOSITORY / "tests").rglob("test_*.py"))
    return [one for path in files for one in proofs_in(path.read_text(), str(path.relative_to(REPOSITORY)))]


def proofs_in(source: str, file: str) -> Iterator[Proof]:
    """Yield what the tests of one module prove. Raises ValueError for a mark with which that could not be true."""
    if ".proves(" not in source:
        return
    tree = ast.parse(source)
    marks = {node for node in ast.walk(tree) if _is_mark(node)}
    for test in tree.body:
        if not isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef) or not test.name.startswith("test_"):
            continue
        for mark in (node for decorator in test.decorator_list for node in ast.walk(decorator) if _is_mark(node)):
            marks.remove(mark)
            features, columns = (_names(argument, tree) for argument in mark.args)  # type: ignore[attr-defined]
            if unknown := {*features} - {*FEATURES} | {*columns} - {*COLUMNS}:
                raise ValueError(f"{file}: {test.name} proves {unknown}, of which FEATURES and COLUMNS have nothing")
            yield from (Proof(feature, column, file, test.name) for feature in features for column in columns)
    if marks:
        raise ValueError(f"{file}: a mark `proves` stands at no test: put it above one")


def _is_mark(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "proves"


def _names(argument: ast.expr, tree: ast.Module) -> list[str]:
    """Return the names that an argument stands for: a text, several, or the keys of a table of the module."""
    match argument:
        case ast.Constant(value=str(name)):
            return [name]
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Dict(keys=parts):
            return [name for part in parts if part is not None for name in _names(part, tree)]
        case ast.Starred(value=several):
            return _names(several, tree)
        case ast.Name(id=name):
            for node in tree.body:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    return _names(node.value, tree)  # type: ignore[attr-defined]
    raise ValueError(f"proves({ast.unparse(argument)}) names nothing that can be read: write a text, or a table's name")


def feature_table() -> str:
    """Return the table, and below it each test and each sentence once. Raises ValueError for a cell that is both."""
    known, notes = proofs(), list[str]()

    def numbers(texts: Sequence[str]) -> str:
        notes.extend(text for text in dict.fromkeys(texts) if text not in notes)
        return ", ".join(map(str, sorted({notes.index(text) + 1 for text in texts})))

    def cell(feature: str, column: str) -> str:
        tests = [str(proof) for proof in known if (proof.feature, proof.column) == (feature, column)]
        sentence, refused = REFUSALS.get(feature, (str, {}))
        words = [word for word, columns in refused.items() if column in columns]
        if tests and words:
            raise ValueError(f"{feature}, {column}: refused, and proven by {tests}")
        if tests or words:
            return f"{'yes' if tests else words[0]} ({numbers(tests or [sentence()])})"
        return "–" if column in WITHOUT.get(feature, ()) else "not tried"

    lines = [f"| feature | {' | '.join(COLUMNS)} |\n", f"|---{'|---' * len(COLUMNS)}|\n"]
    lines += [f"| {name} | {' | '.join(cell(name, column) for column in COLUMNS)} |\n" for name in FEATURES]
    return "".join([*lines, "\n", *(f"{number}. {text}\n" for number, text in enumerate(notes, 1))])


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: feature_table(), PAGE.read_text()))
