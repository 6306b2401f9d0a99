"""Which weights an engine has: equal names mean that their KV may be exchanged."""

import os
import shutil

import pytest

from ridgeline.engine.connector.layout import SAMPLE_BYTES, weights_digest

MIB = 2**20


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
