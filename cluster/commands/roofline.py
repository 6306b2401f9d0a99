"""`ridgeline roofline`: finds the model's shape and the device, prints the table."""

from __future__ import annotations

from rich.console import Console

from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.doctor.checks import resolve_dtype
from ridgeline.cluster.model_store import DEFAULT_MODEL_NAME, prepare_model
from ridgeline.cluster.user_folders import cache_folder
from ridgeline.roofline.analysis import roofline_table
from ridgeline.roofline.calibration import load_or_calibrate_host
from ridgeline.roofline.hardware import hardware_by_name
from ridgeline.roofline.model_shape import load_model_shape
from ridgeline.roofline.quantisation import dtype_bytes
from ridgeline.roofline.render import render, to_json


def show(console: Console, model: str, hardware_name: str, dtype: str, cores: int, *, as_json: bool) -> None:
    """Print the roofline of `model` on a device. Raises RooflineError for an unknown name, ModelError for a model."""
    path = str(prepare_model(model)) if model == DEFAULT_MODEL_NAME else model
    if dtype == "auto":
        dtype = resolve_dtype(RidgelineConfig()) if hardware_name == "host" else "bfloat16"
    element_bytes = dtype_bytes(dtype)
    shape = load_model_shape(path, weight_bytes_per_param=element_bytes, kv_bytes_per_element=element_bytes)
    if hardware_name == "host":
        hardware = load_or_calibrate_host(cache_folder(), cores, dtype)
    else:
        hardware = hardware_by_name(hardware_name)
    rows = roofline_table(shape, hardware)
    if as_json:
        console.out(to_json(shape, hardware, rows), highlight=False)
    else:
        console.print(render(shape, hardware, rows))
