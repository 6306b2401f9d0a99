"""What a person and a program see of a roofline."""

import io
import json

import pytest
from rich.console import Console

from ridgeline.roofline.analysis import roofline_table
from ridgeline.roofline.hardware import Hardware, hardware_by_name
from ridgeline.roofline.known_models import KNOWN_MODELS
from ridgeline.roofline.model_shape import load_model_shape
from ridgeline.roofline.render import render, to_json


def shown(shape, hardware, width=80):
    out = io.StringIO()
    Console(file=out, width=width).print(render(shape, hardware, roofline_table(shape, hardware)))
    return out.getvalue()


def test_the_picture_names_shape_kv_bytes_ridge_and_bounds():
    text = shown(load_model_shape("llama-3.1-8b"), hardware_by_name("h100"))
    for expected in ("llama-3.1-8b", "8.03 G parameters", "131,072 B per token", "ridge 295.2", "compute", "memory"):
        assert expected in text
    assert "dense bf16 peak 989 TFLOP/s, memory 3,350 GB/s" in " ".join(text.split())


@pytest.mark.parametrize("name", sorted(KNOWN_MODELS))
def test_every_known_model_can_be_shown_uncut_in_80_columns(name):
    text = shown(load_model_shape(name), hardware_by_name("l4"))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


def test_a_model_too_large_for_the_device_says_so():
    assert "do not fit" in shown(load_model_shape("llama-3.1-70b"), hardware_by_name("h100"))


def test_a_device_of_unknown_size_makes_no_claim_about_fitting():
    text = shown(load_model_shape("smollm2-135m"), Hardware("[box]", 1e12, 1e10, "measured [here]"))
    assert "?" in text
    assert "[box] (measured [here])" in text
    assert "sequences of" not in text


def test_json_holds_the_same_rows_unrounded():
    shape, hardware = load_model_shape("deepseek-v3"), hardware_by_name("h200")
    rows = roofline_table(shape, hardware)
    data = json.loads(to_json(shape, hardware, rows))
    assert data["model"]["kv_bytes_per_token"] == 70_272
    assert data["hardware"]["ridge"] == hardware.ridge
    assert [row["floor_ms"] for row in data["rows"]] == [row.floor_ms for row in rows]


def test_a_mixture_of_experts_claims_no_ridge_batch_because_its_reads_grow_with_the_batch():
    hardware = hardware_by_name("h100")
    assert "ridge batch 295" in shown(load_model_shape("llama-3.1-8b"), hardware)
    assert "ridge batch" not in shown(load_model_shape("mixtral-8x7b"), hardware)
    assert json.loads(to_json(load_model_shape("mixtral-8x7b"), hardware, []))["hardware"]["ridge_batch"] is None
