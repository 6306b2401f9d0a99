"""Other people's clients use the deployment as their users do: no error, and they read what was served."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.engines.harness import Engines

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

REPOSITORY = Path(__file__).parents[2]
PYTHON = REPOSITORY / ".venv-clients" / "bin" / "python"
ALLOWED_S = 120.0
NOTHING_FROM_ELSEWHERE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "NO_PROXY": "127.0.0.1",
}
"""These clients ask servers of their own makers at start, unless told otherwise."""


@pytest.mark.parametrize("client", ["openai", "anthropic", "litellm", "langchain", "lm_eval"])
async def test_a_client_of_others_reads_what_is_served(engines: Engines, client: str, tmp_path: Path):
    assert PYTHON.exists(), "run `make clients`, which installs these clients beside our environment"
    script = REPOSITORY / "tests" / "clients" / f"with_{client}.py"
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, "-P", script, engines.url, engines.model, engines.model_path),
        env={**os.environ, **NOTHING_FROM_ELSEWHERE, "HF_HOME": str(tmp_path)},
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), ALLOWED_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode(errors="replace")[-6000:]
