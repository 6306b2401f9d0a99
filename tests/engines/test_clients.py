"""Other people's clients use the deployment as their users do: no error, and they read what was served."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engines.harness import Engines

pytestmark = [
    pytest.mark.engines,
    pytest.mark.long,  # their packages take minutes to install and to import
    pytest.mark.exact("float32"),  # they compare answers to one prompt, which in bfloat16 differ at a tie
    pytest.mark.asyncio(loop_scope="session"),
]

REPOSITORY = Path(__file__).parents[2]
PYTHON = REPOSITORY / ".venv-clients" / "bin" / "python"
ALLOWED_S = 300.0
NOTHING_FROM_ELSEWHERE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "NO_PROXY": "127.0.0.1",
}
"""These clients ask servers of their own makers at start, unless told otherwise."""


Run = tuple[int, str]
CLIENTS = ("openai", "anthropic", "litellm", "langchain", "lm_eval")


async def run(client: str, engines: Engines, folder: Path) -> Run:
    """The exit status of its script, and all that it wrote."""
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, "-P", REPOSITORY / "tests" / "clients" / f"with_{client}.py"),
        *(engines.url, engines.model, engines.model_path),
        env={**os.environ, **NOTHING_FROM_ELSEWHERE, "HF_HOME": str(folder)},
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), ALLOWED_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode(errors="replace")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def runs(deployment: Engines, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """All of them at once, as they would meet on a server: one after the other takes three times as long."""
    assert PYTHON.exists(), "run `make clients`, which installs these clients beside our environment"
    folders = [tmp_path_factory.mktemp(client) for client in CLIENTS]
    ended = await asyncio.gather(*(run(client, deployment, at) for client, at in zip(CLIENTS, folders, strict=True)))
    return dict(zip(CLIENTS, ended, strict=True))


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_client_of_others_reads_what_is_served(runs: dict[str, Run], client: str):
    status, output = runs[client]
    assert status == 0, output[-6000:]
