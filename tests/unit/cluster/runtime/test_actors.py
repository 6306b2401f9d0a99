"""What the process of an engine is told by the environment."""

import pytest

from ridgeline.cluster.runtime.actors import engine_environment


@pytest.mark.parametrize(
    ("options", "variable", "value"),
    [
        ({"on_cpu": True}, "TORCH_COMPILE_DISABLE", "1"),
        ({"on_cpu": True, "compiles": True}, "TORCH_COMPILE_DISABLE", None),
        ({"on_cpu": False, "mps_percent": 70}, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "70"),
        ({"on_cpu": False}, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", None),
    ],
)
def test_an_engine_is_told_whether_it_compiles_and_its_share_of_a_gpu(options, variable, value):
    assert engine_environment(4, 60, **options).get(variable) == value
