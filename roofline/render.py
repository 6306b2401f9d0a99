"""Prints a roofline for people (rich) or programs (JSON)."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ridgeline.roofline.analysis import (
    DECODE_CONTEXT_TOKENS,
    RooflineRow,
    decode_floor_s,
    ridge_batch,
    sequences_that_fit,
)
from ridgeline.roofline.hardware import Hardware
from ridgeline.roofline.model_shape import ModelShape

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_LEGEND = (
    "AI = FLOPs / bytes moved; above the ridge compute binds, below it memory does. "
    "floor = max(FLOPs / peak FLOP/s, bytes / peak byte/s); weights are read once a step, KV once per sequence; "
    "attention is causal. tok/s is the best the floor allows."
)


def render(shape: ModelShape, hardware: Hardware, rows: Sequence[RooflineRow]) -> Group:
    """Render the facts about model and hardware, the table of steps, and a legend."""
    return Group(_facts(shape, hardware), _steps(rows), Text(_LEGEND, style="dim"))


def to_json(shape: ModelShape, hardware: Hardware, rows: Sequence[RooflineRow]) -> str:
    """Return the same figures, unrounded, as one JSON object with `model`, `hardware` and `rows`."""
    model = asdict(shape) | {
        "num_params": shape.num_params,
        "num_active_params": shape.num_active_params,
        "weight_bytes": shape.weight_bytes,
        "kv_bytes_per_token": shape.kv_bytes_per_token,
    }
    device = asdict(hardware) | {
        "ridge": hardware.ridge,
        "ridge_batch": _ridge_batch(shape, hardware),
    }
    return json.dumps({"model": model, "hardware": device, "rows": [asdict(row) for row in rows]}, indent=2)


def _facts(shape: ModelShape, hardware: Hardware) -> Table:
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for label, value in (*_model_facts(shape), *_hardware_facts(shape, hardware)):
        facts.add_row(label, Text(value))
    return facts


def _model_facts(shape: ModelShape) -> list[tuple[str, str]]:
    if shape.is_mla:
        attention = f"MLA, {shape.num_q_heads} heads, latent {shape.kv_lora_rank} + rope {shape.qk_rope_head_dim}"
    else:
        attention = f"{shape.num_q_heads} query / {shape.num_kv_heads} KV heads of {shape.head_dim}"
    size = f"{_quantity(shape.num_params, '')} parameters, weights {_quantity(shape.weight_bytes, 'B')}"
    if shape.num_experts:
        size += (
            f", {_quantity(shape.num_active_params, '')} active "
            f"({shape.experts_per_token} of {shape.num_experts} experts a token)"
        )
    kept = f"{shape.kv_bytes_per_token:,.0f} B per token"
    if shape.num_window_layers:
        kept += (
            f", {shape.num_window_layers} of {shape.num_attention_layers} layers keep {shape.window_tokens:,} tokens"
        )
    if shape.num_state_layers:
        kept += f", and {_quantity(shape.state_bytes, 'B')} of states a sequence"
    return [
        ("model", shape.name),
        ("layers", f"{shape.num_layers} of width {shape.hidden_size}; {attention}"),
        ("size", size),
        ("KV cache", kept),
    ]


def _hardware_facts(shape: ModelShape, hardware: Hardware) -> list[tuple[str, str]]:
    floor_s = decode_floor_s(shape.num_active_params - shape.embedding_params, shape.weight_bytes_per_param, hardware)
    dense_ridge_batch = _ridge_batch(shape, hardware)
    facts = [
        ("hardware", f"{hardware.name} ({hardware.source})"),
        (
            "peaks",
            f"{_quantity(hardware.peak_flops, 'FLOP/s')}, {_quantity(hardware.peak_bytes_per_s, 'B/s')}; "
            f"ridge {hardware.ridge:.1f} FLOP/B",
        ),
        (
            "decode",
            f"weights alone {floor_s * 1e3:.3g} ms a token at batch 1"
            + ("" if dense_ridge_batch is None else f"; ridge batch {dense_ridge_batch:.0f} before KV"),
        ),
    ]
    if hardware.memory_bytes is not None:
        facts.append(("memory", _memory_fact(shape, hardware.memory_bytes)))
    return facts


def _ridge_batch(shape: ModelShape, hardware: Hardware) -> float | None:
    """Return the ridge batch; None for a mixture of experts, whose weight bytes grow with the batch."""
    return None if shape.num_experts else ridge_batch(hardware, shape.weight_bytes_per_param)


def _memory_fact(shape: ModelShape, memory_bytes: float) -> str:
    free_bytes = memory_bytes - shape.weight_bytes
    if free_bytes <= 0:
        return f"{_quantity(memory_bytes, 'B')}: the weights do not fit on one device"
    count = sequences_that_fit(free_bytes, shape.kv_bytes(DECODE_CONTEXT_TOKENS))
    return (
        f"{_quantity(memory_bytes, 'B')}: beside the weights at most {count:,} sequences of "
        f"{DECODE_CONTEXT_TOKENS:,} tokens"
    )


def _steps(rows: Sequence[RooflineRow]) -> Table:
    """Build a table with one line per step, 80 columns wide; decode computes batch times 1 + drafted tokens."""
    table = Table(box=box.SIMPLE, padding=0, pad_edge=False)
    for heading in ("phase", "bound"):
        table.add_column(heading, no_wrap=True)
    for heading in ("tokens", "context", "FLOPs", "bytes", "AI", "floor ms", "tok/s", "fits"):
        table.add_column(heading, justify="right", no_wrap=True)
    previous_phase = rows[0].phase if rows else ""
    for row in rows:
        if row.phase != previous_phase:
            table.add_section()
            previous_phase = row.phase
        table.add_row(*_cells(row))
    return table


def _cells(row: RooflineRow) -> list[str]:
    return [
        row.phase,
        f"[{'cyan' if row.bound == 'compute' else 'magenta'}]{row.bound}[/]",
        f"{row.new_tokens:,}",
        f"{row.context_tokens:,}",
        _quantity(row.flops, ""),
        _quantity(row.bytes, "B"),
        f"{row.arithmetic_intensity:.1f}",
        f"{row.floor_ms:.3g}" if row.floor_ms < 1000 else f"{row.floor_ms:,.0f}",
        f"{row.tokens_per_s:,.0f}" if row.tokens_per_s >= 100 else f"{row.tokens_per_s:.3g}",
        "?" if row.fits is None else "yes" if row.fits else "no",
    ]


def _quantity(value: float, unit: str) -> str:
    for scale, prefix in _PREFIXES:
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()
