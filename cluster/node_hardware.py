"""The peaks of the node this runs on: measured on a CPU, from the table for a known GPU.

Called in processes of the workers' actors, since the node that runs the command may be another kind of machine.
Peaks only feed metrics: a GPU that is not in the table is served all the same, and has no peak series.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.cluster.node_gpus import Gpu, NoGpus, read_gpus
from ridgeline.cluster.user_folders import cache_folder
from ridgeline.roofline.calibration import load_or_calibrate_host
from ridgeline.roofline.hardware import Hardware, hardware_of_gpu
from ridgeline.router.settings import PoolHardware


class UnknownHardware(RuntimeError):
    """No peaks are known for this node's GPUs; the message says why."""


def worker_hardware(dtype: str, cores: int, gpus: int, *, fp8: bool = False) -> PoolHardware | str:
    """Return the peaks of one worker on this node, or a sentence that says why none are known.

    Measuring a CPU takes about 4 s the first time. `fp8` says that the model's matrices are multiplied in FP8.
    """
    try:
        if gpus:
            hardware = peaks_of(read_gpus(), dtype, fp8=fp8).times(gpus)
        else:
            hardware = load_or_calibrate_host(cache_folder(), cores, dtype)
    except NoGpus as error:
        return f"no peak FLOP/s and bandwidth are known, since {error}"
    except UnknownHardware as error:
        return str(error)
    return PoolHardware(hardware.name, hardware.peak_flops, hardware.peak_bytes_per_s, hardware.source)


def peaks_of(gpus: Sequence[Gpu], dtype: str, *, fp8: bool = False) -> Hardware:
    """Return the published peaks of one of these GPUs, which must be alike. Raises UnknownHardware."""
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        raise UnknownHardware(
            f"this node has GPUs of several kinds, {' and '.join(names)}, and one peak would be wrong"
        )
    if any(gpu.partitioned for gpu in gpus):
        raise UnknownHardware(f"{names[0]} is cut into MIG instances, for whose parts no peaks are published")
    if dtype == "float32":
        raise UnknownHardware("the table has bfloat16 and FP8 peaks of GPUs, and model.dtype is float32")
    memory_gib = gpus[0].memory_bytes / 2**30
    for in_fp8 in (fp8, False):  # an A100 multiplies FP8 weights in bfloat16
        known = hardware_of_gpu(gpus[0].name, gpus[0].memory_bytes, fp8=in_fp8)
        if known is not None:
            return known
    raise UnknownHardware(
        f"no peak FLOP/s and bandwidth are known for {names[0]!r} with {memory_gib:.0f} GiB: add it to "
        "roofline/hardware.csv"
    )
