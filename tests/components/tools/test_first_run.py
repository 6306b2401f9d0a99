"""Which fetches make the first run on GPUs fail: those that failed, and not one that its own client has cancelled."""

import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "tools/gpu/first_run.sh"
LINE = 'ridgeline_fetches_total{pool="decode",result="%s",transport="grpc"} %s\n'


@pytest.mark.parametrize(
    ("counts", "passes"),
    [
        ({"ok": 60.0, "cancelled": 1.0, "failed": 0.0}, True),
        ({"ok": 60.0, "cancelled": 0.0, "failed": 1.0}, False),
        ({"failed": 0.0}, False),
    ],
)
def test_a_fetch_that_the_client_cancelled_is_none_that_failed(tmp_path, counts, passes):
    metrics = tmp_path / "metrics.txt"
    metrics.write_text("".join(LINE % pair for pair in counts.items()))
    judge = re.search(r"^all_fetched\(\) \{.*?^\}", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    assert judge is not None
    ran = subprocess.run(["bash", "-c", f"{judge[0]}\nall_fetched {metrics}"], check=False, capture_output=True)
    assert (ran.returncode == 0) == passes
