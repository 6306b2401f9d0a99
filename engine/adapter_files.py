"""LoRA adapters on disk: why an engine could not load one, what makes two the same, and the copies that engines load.

An engine reads an adapter's files again whenever it needs one that has left its memory. So each node has a copy that
nobody changes: other weights under the old name would give wrong answers, and missing ones would end the engine.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

from ridgeline.contracts.errors import AdapterRefused

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""An engine loads the first of them that there is."""
RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM's `max_lora_rank` may be."""
READ_AT_ONCE_BYTES: Final = 1 << 20
MOST_HEADER_BYTES: Final = 100 << 20
_LAYER: Final = re.compile(r"\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])\.")
_FROM_HIDDEN: Final = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_TO_HIDDEN: Final = ("o_proj", "down_proj")
_TO_KV: Final = ("k_proj", "v_proj")
_OF_SOME_LAYERS: Final = ("global_", "num_global_", "swa_", "v_head_dim")
"""How keys of a config.json begin that give some layers heads of their own, or values another width than keys."""


def require_fit(folder: Path, max_rank: int, model: Mapping[str, Any]) -> None:
    """Raise AdapterRefused if an engine with this `max_lora_rank` and this model's config.json could not load it."""
    config, weights = _config_of(folder), _weights_of(folder)
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise AdapterRefused(f"the adapter in {folder} is of type {kind}, not LORA: name a LoRA adapter")
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
        raise AdapterRefused(f"{folder / CONFIG} has no rank r: save the adapter with PEFT's save_pretrained")
    if (rank := max(ranks)) > max_rank:
        enough = next((one for one in RANKS if one >= rank), None)
        fix = f"set it to {enough} and start again" if enough else f"name one of at most {RANKS[-1]}"
        raise AdapterRefused(
            f"the adapter in {folder} has rank {rank}, above engine_args.max_lora_rank ({max_rank}): {fix}"
        )
    shape: Mapping[str, Any] = {**model, **(model.get("text_config") or {})}
    if weights.suffix == ".safetensors" and (why := _misfit(_shapes_of(weights), shape)):
        base = config.get("base_model_name_or_path") or "another model"
        raise AdapterRefused(f"the adapter in {folder} was made for {base}: {why}. Name an adapter of this model")


def _config_of(folder: Path) -> dict[str, Any]:
    where = f"{folder} on {socket.gethostname()}"
    if not folder.is_dir():
        raise AdapterRefused(f"there is no folder {where}: copy the adapter there, on every node with workers")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AdapterRefused(f"{where} has no {CONFIG}: name a folder that PEFT has saved") from None
    except (OSError, ValueError) as error:
        raise AdapterRefused(f"{folder / CONFIG} cannot be read ({error}): copy the adapter anew") from None
    if not isinstance(config, dict):
        raise AdapterRefused(f"{folder / CONFIG} is not an object: copy the adapter anew")
    return config


def _weights_of(folder: Path) -> Path:
    found = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if found is None:
        raise AdapterRefused(
            f"{folder} on {socket.gethostname()} has no {WEIGHTS[0]}: name a folder with the adapter's weights"
        )
    return found


def _shapes_of(weights: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor, from the header of a safetensors file."""
    try:
        with weights.open("rb") as file:
            (length_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length_bytes, MOST_HEADER_BYTES)))
        return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, struct.error, AttributeError, KeyError, TypeError) as error:
        raise AdapterRefused(f"{weights} is no safetensors file ({error}): copy the adapter anew") from None


def _misfit(shapes: Mapping[str, list[int]], model: Mapping[str, Any]) -> str:
    """Return what differs from the model in layers or width; empty if nothing does, as far as its config tells.

    vLLM itself ignores layers beyond the model's, and pads what is too narrow.
    """
    layers, hidden, kv = model.get("num_hidden_layers"), model.get("hidden_size"), _kv_width(model)
    for name, shape in shapes.items():
        found = _LAYER.search(name)
        if found is None or "vision" in name or "visual" in name:
            continue
        layer, module, half = int(found[1]), found[2], found[3]
        if layers is not None and layer >= layers:
            return f"it has a layer {layer}, and this model has {layers} layers"
        into = half == "A" and module in _FROM_HIDDEN
        if hidden is not None and (into or (half == "B" and module in _TO_HIDDEN)):
            width = shape[1 if into else 0]
            if width != hidden:
                return f"its {module} is {width} wide, and this model's hidden size is {hidden}"
        if kv and half == "B" and module in _TO_KV and shape[0] != kv:
            return f"its {module} is {shape[0]} wide, and this model's KV heads are {kv} together"
    return ""


def _kv_width(model: Mapping[str, Any]) -> int:
    """Return how wide all KV heads of each layer are together; 0 where layers may differ, or it is not known."""
    if any(key.startswith(_OF_SOME_LAYERS) for key in model):
        return 0
    heads, kv_heads = model.get("num_attention_heads"), model.get("num_key_value_heads")
    width = model.get("head_dim") or (heads and (model.get("hidden_size") or 0) // heads)
    return width * kv_heads if isinstance(width, int) and isinstance(kv_heads, int) else 0


def digest_of(folder: Path) -> str:
    """Return a short name for the content of the adapter's files. Raises AdapterRefused."""
    _config_of(folder)
    digest = hashlib.sha256()
    for file in (folder / CONFIG, _weights_of(folder)):
        try:
            with file.open("rb") as content:
                digest.update(f"{file.name}\0{os.fstat(content.fileno()).st_size}\0".encode())
                while some := content.read(READ_AT_ONCE_BYTES):
                    digest.update(some)
        except OSError as error:
            raise AdapterRefused(f"{file} cannot be read ({error.strerror})") from None
    return digest.hexdigest()[:32]


class AdapterCopies:
    """The copies of one process; those of all processes of a user on a node share their files.

    A copy is a folder with the digest as its name. Whoever uses it has a shared lock on it, which the kernel drops if
    that process dies; whoever gets an exclusive one removes it. Methods may block for as long as the disk takes.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or Path(tempfile.gettempdir()) / f"ridgeline-adapters-{os.getuid()}"
        self._held: dict[str, IO[str]] = {}

    def folder(self, digest: str) -> Path:
        """Return where a copy is."""
        return self._root / digest

    def keep(self, source: Path, digest: str = "") -> str:
        """Have a copy of what is in `source`, or of this digest; return the digest. Raises AdapterRefused.

        A copy that is there already is used even where `source` has changed since, or is gone.
        """
        with self._alone():
            if not (digest and self.folder(digest).is_dir()):
                found = digest_of(source)
                if digest not in ("", found):
                    raise AdapterRefused(
                        f"{source} on {socket.gethostname()} has other files than when the adapter was loaded: load it "
                        "again with load_inplace"
                    )
                digest = found
            if digest not in self._held:
                self._take(source, digest)
        return digest

    def drop(self, *digests: str) -> None:
        """Use these no more; remove every copy that no process uses."""
        with self._alone():
            for digest in digests:
                if (lock := self._held.pop(digest, None)) is not None:
                    lock.close()
            for folder in self._root.iterdir():
                if folder.is_dir():
                    self._remove_unused(folder)

    def close(self) -> None:
        """Use none any more."""
        if self._held:
            self.drop(*self._held)

    def _take(self, source: Path, digest: str) -> None:
        folder = self.folder(digest)
        try:
            if not folder.is_dir():
                copying = Path(tempfile.mkdtemp(prefix=".copying-", dir=self._root))
                for file in (source / CONFIG, _weights_of(source)):
                    shutil.copyfile(file, copying / file.name)
                if digest_of(copying) != digest:
                    shutil.rmtree(copying)
                    raise AdapterRefused(f"{source} changes while it is read: load it once it is complete")
                copying.rename(folder)
            lock = (folder / ".lock").open("w")
        except OSError as error:
            raise AdapterRefused(
                f"no copy of {source} can be made in {self._root} ({error.strerror}): free space there, or set TMPDIR"
            ) from None
        fcntl.flock(lock, fcntl.LOCK_SH)
        self._held[digest] = lock

    def _remove_unused(self, folder: Path) -> None:
        with (folder / ".lock").open("w") as lock, suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let one process at a time look at the copies."""
        try:
            self._root.mkdir(mode=0o700, exist_ok=True)
            found = self._root.lstat()  # another user's link could lead to a folder of ours, which would be emptied
            if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
                raise AdapterRefused(f"{self._root} is no folder of this user's: set TMPDIR to another one")
            lock = (self._root / ".lock").open("w")
        except OSError as error:
            raise AdapterRefused(f"{self._root} cannot be written ({error.strerror}): set TMPDIR") from None
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
