"""Which weights an engine has: equal names mean that their KV may be exchanged."""

import os
import shutil

import pytest

from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly

# isort: split
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec

from ridgeline.engine.connector.layout import SAMPLE_BYTES, heads_are_runs, kv_format, weights_digest

MIB = 2**20
SHAPE = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**SHAPE)
LATENT = MLAAttentionSpec(**{**SHAPE, "num_kv_heads": 1, "head_size": 576})
STATE = MambaSpec(shapes=((8,),), dtypes=(torch.float32,), block_size=32)
HEADS_FIRST = torch.zeros(4, 2, 32, 128)


@pytest.mark.parametrize(
    ("cache", "spec", "layout", "runs"),
    [
        (HEADS_FIRST, FULL, "LBHNC", True),
        (HEADS_FIRST, FULL, "BLHNC", True),
        (HEADS_FIRST, FULL, "LBNHC", False),
        (HEADS_FIRST.unflatten(0, (2, 2)), FULL, "LBHNC", False),
        (HEADS_FIRST, FullAttentionSpec(**SHAPE, num_head_slots=4), "LBHNC", False),
        (HEADS_FIRST, FullAttentionSpec(**SHAPE, page_size_padded=FULL.page_size_bytes + 64), "LBHNC", False),
        (HEADS_FIRST, STATE, "LBHNC", False),
        (torch.zeros(4, 1, 32, 576), LATENT, "LBHNC", False),
    ],
    ids=["heads first", "blocks first", "tokens first", "kernel blocks", "packed", "padded", "states", "latent"],
)
def test_ranks_may_share_a_block_only_where_heads_are_runs_of_bytes(cache, spec, layout, runs):
    assert heads_are_runs(spec, [cache], layout) is runs


def test_formats_that_torch_has_no_type_for_are_told_apart():
    assert kv_format(torch.bfloat16, "auto") == kv_format(torch.bfloat16, "bfloat16") == "bfloat16"
    assert kv_format(torch.uint8, "fp8_e4m3") != kv_format(torch.uint8, "fp8_e5m2")


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "a.safetensors").write_bytes(os.urandom(MIB))
    (folder / "b.safetensors").write_bytes(os.urandom(100))
    return folder


def test_a_copy_elsewhere_has_the_same_weights(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "README.md").write_text("another file")
    assert weights_digest(str(copy)) == weights_digest(str(model)) != ""


@pytest.mark.parametrize("at", [0, MIB // 2, MIB - 1])
def test_other_weights_of_the_same_shape_are_others(model, at):
    before = weights_digest(str(model))
    changed = bytearray((model / "a.safetensors").read_bytes())
    for position in range(0, MIB, SAMPLE_BYTES):  # a revision changes weights everywhere
        changed[(position + at) % MIB] ^= 1
    (model / "a.safetensors").write_bytes(changed)
    assert weights_digest(str(model)) != before


def test_what_has_no_weights_on_disk_has_no_name(tmp_path):
    assert weights_digest(str(tmp_path)) == ""
    assert weights_digest("nobody/has-this-model") == ""
