"""Whether the installed vLLM makes text with a model's architecture, and whether the model's imports are there.

vLLM takes a quarter of a minute to import and finds out in each engine's start, so its own tables are read from its
source instead; where they are not as expected, nothing is refused. What a model with images or sound needs is tried by
loading its processor in a process of its own.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

_TEXT: Final = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
_MULTIMODAL: Final = "_MULTIMODAL_MODELS"
_NO_TEXT: Final = (
    *("_EMBEDDING_MODELS", "_LATE_INTERACTION_MODELS", "_REWARD_MODELS"),
    *("_TOKEN_CLASSIFICATION_MODELS", "_SEQUENCE_CLASSIFICATION_MODELS"),
)
_BACKEND: Final = "_TRANSFORMERS_BACKEND_MODELS"
_DROPPED: Final = "_PREVIOUSLY_SUPPORTED_MODELS"
_NO_TEXT_SUFFIXES: Final = (
    *("ForTextEncoding", "EmbeddingModel", "Classification", "ClassificationModel", "RewardModel", "RewardModeling"),
)
"""What vLLM takes for such a model by its name (`_SUFFIX_TO_DEFAULTS`), but for the vague "Model"."""
_TEXT_SUFFIXES: Final = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")
"""From the same list: a name that vLLM does not know stands for one that it knows with another of these suffixes."""
LOAD_WITHIN_S: Final = 120.0
_CHOOSE: Final = ": set model.path to a text-generation model that the installed vLLM supports"
_IMPORT_FAILED: Final = 3
"""How the process below ends at such an error: Python itself ends with 1 or 2."""
_LOAD: Final = f"""
import sys
try:
    from transformers import AutoProcessor
    AutoProcessor.from_pretrained(sys.argv[1], trust_remote_code=False)
except ImportError as error:
    print("", *str(error).split())
    sys.exit({_IMPORT_FAILED})
"""


def architecture_reason(config: Mapping[str, Any]) -> str | None:
    """Return why the installed vLLM makes no text with a model of this `config.json`; None if it may well do."""
    names = [name for name in config.get("architectures") or () if isinstance(name, str)]
    tables = _tables()
    if not names or not tables:
        return None
    if any(name in tables[table] for name in names for table in _TEXT):
        return None
    named = ", ".join(names)
    if any(name in tables[table] for name in names for table in _NO_TEXT) or names[0].endswith(_NO_TEXT_SUFFIXES):
        return f"{named} computes embeddings or scores and makes no text{_CHOOSE}"
    if "auto_map" in config or _has_plugins() or any(_may_be_served(name) for name in names):
        return None
    dropped = next((tables[_DROPPED][name] for name in names if name in tables[_DROPPED]), None)
    if dropped is not None:
        return f"vLLM has dropped {named} after version {dropped}{_CHOOSE}"
    return f"neither the installed vLLM nor the installed transformers knows {named}{_CHOOSE}"


def pooling_reason(directory: Path) -> str | None:
    """Return why a model whose files say that its vectors are pooled makes no text (Sentence Transformers)."""
    try:
        modules = json.loads((directory / "modules.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    kinds = [str(module.get("type")) for module in modules if isinstance(module, dict)]
    if any(kind.endswith(".Pooling") for kind in kinds):
        return f"its modules.json makes it a model of embeddings, and so it makes no text{_CHOOSE}"
    return None


@cache
def missing_import(directory: str, architectures: tuple[str, ...]) -> str:
    """Return what a model with images or sound cannot import here, in its own words; empty if nothing is known.

    Takes some seconds for such a model, and nothing for others.
    """
    tables = _tables()
    if not tables or not any(name in tables[_MULTIMODAL] for name in architectures):
        return ""
    try:
        tried = subprocess.run(
            [sys.executable, "-P", "-c", _LOAD, directory],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LOAD_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ""
    if tried.returncode != _IMPORT_FAILED:
        return ""
    return tried.stdout.splitlines()[-1].strip().partition(". ")[0].rstrip(".")


@cache
def _tables() -> dict[str, dict[str, Any]]:
    """Return vLLM's tables of architectures; none of them if one is not there."""
    source = _source("vllm", "model_executor/models/registry.py")
    wanted = {*_TEXT, *_NO_TEXT, _BACKEND, _DROPPED}
    found = {
        statement.targets[0].id: _written_out(statement.value)
        for statement in ast.parse(source).body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.Dict)
    }
    return {name: found[name] for name in wanted} if wanted <= found.keys() else {}


def _written_out(table: ast.Dict) -> dict[str, Any]:
    """Return the entries whose key is written out, with their values if those are too."""
    entries = zip(table.keys, table.values, strict=True)
    return {
        str(key.value): value.value if isinstance(value, ast.Constant) else None
        for key, value in entries
        if isinstance(key, ast.Constant)
    }


def _source(package: str, file: str) -> str:
    spec = find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder, file)).is_file():
            return path.read_text(encoding="utf-8")
    return ""


def _has_plugins() -> bool:
    """Return whether something beside vLLM is installed that may teach it more architectures."""
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    return any(not plugin.value.startswith("vllm.") for plugin in plugins)


def _may_be_served(name: str) -> bool:
    """Return whether vLLM may serve a name that is not among its models: by another suffix, or through transformers."""
    tables = _tables()
    stems = [name.removesuffix(suffix) for suffix in _TEXT_SUFFIXES if name.endswith(suffix)]
    others = [stem + suffix for stem in stems for suffix in _TEXT_SUFFIXES]
    return (
        name in tables[_BACKEND]
        or any(other in tables[table] for other in others for table in _TEXT)
        or _is_known_to_transformers(name)
    )


@cache
def _is_known_to_transformers(name: str) -> bool:
    """Return whether vLLM may load it through transformers; where its names are not to be read, it may."""
    source = _source("transformers", "models/auto/modeling_auto.py")
    return not source or f'"{name}"' in source
