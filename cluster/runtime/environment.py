"""Variables of an operator's shell that would change the HTTP server, or a Ray of our own, and so must not reach them.

vLLM's app and uvicorn read them wherever they are imported: some add routes by which anybody can look into an engine or
steer it, some let other keys in or believe other headers, some log answers. Ray takes its address, its job, hooks and
each of its settings from them. What the server does is for the one configuration to say. Those for kernels, caches and
limits are left alone.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ridgeline.cluster.config.api_keys import KEYS_VARIABLE

KEY_VARIABLES: Final = frozenset({KEYS_VARIABLE, "RIDGELINE_ADMIN_KEY_FILE", "RIDGELINE_METRICS_KEY"})
"""Variables that hold keys; only the commands they were given to may read them."""
CLIENT_KEY_PREFIX: Final = "RIDGELINE_API_KEY"
"""Of the variables that hold a client's keys: one for each server that is compared may have its name behind it."""
SERVER_VARIABLES: Final = frozenset(
    {
        "FORWARDED_ALLOW_IPS",
        "PROMETHEUS_MULTIPROC_DIR",
        "WEB_CONCURRENCY",
        "VLLM_ALLOW_INSECURE_SERIALIZATION",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "VLLM_API_KEY",
        "VLLM_DEBUG_LOG_API_SERVER_RESPONSE",
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
        "VLLM_ENABLE_COHERE_API",
        "VLLM_ENABLE_RESPONSES_API_STORE",
        "VLLM_ENFORCE_STRICT_TOOL_CALLING",
        "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS",
        "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE",
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
        "VLLM_LOGGING_CONFIG_PATH",
        "VLLM_MEDIA_CONNECTOR",
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS",
        "VLLM_RUST_FRONTEND_PATH",
        "VLLM_SERVER_DEV_MODE",
        "VLLM_SKIP_MODEL_NAME_VALIDATION",
        "VLLM_SYSTEM_START_DATE",
        "VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY",
        "VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT",
        "VLLM_USE_RUST_FRONTEND",
        "prometheus_multiproc_dir",
    }
)
SERVER_PREFIXES: Final = ("CUSTOM_FASTAPI_", "SAGEMAKER_", "UVICORN_")

FORWARDED_PREFIXES: Final = ("HF_", "NCCL_", "UCX_", "GLOO_")
FORWARDED: Final = frozenset({"HUGGING_FACE_HUB_TOKEN", "CUDA_MPS_PIPE_DIRECTORY"})

RAY_TAKEN: Final = frozenset(
    {"RAY_TMPDIR", "RAY_CLIENT_MODE", "RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"}
)
"""Ray's variables that a Ray of our own has as they are: but for the first one, Ray or `ray_start` sets them."""
RAY_TOKEN: Final = secrets.token_hex(32)
"""What a Ray of our own asks everybody for. Ray would write its own below the home, which may not be possible."""


def forwarded_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that every node of a joined cluster must have as the shell of `serve` has them.

    They say how a model is downloaded, what network libraries use and where MPS listens. A Ray that is started here
    inherits them.
    """
    return {
        name: value for name, value in environment.items() if name in FORWARDED or name.startswith(FORWARDED_PREFIXES)
    }


def server_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """List the variables that are set and would change the server."""
    return sorted(name for name in environment if name in SERVER_VARIABLES or name.startswith(SERVER_PREFIXES))


def ray_variables() -> list[str]:
    """List the variables that are set and would lead a Ray of our own elsewhere, or change it."""
    return sorted(name for name in os.environ if name.startswith("RAY_") and name not in RAY_TAKEN)


def _key_variables() -> list[str]:
    return [name for name in os.environ if name in KEY_VARIABLES or name.startswith(CLIENT_KEY_PREFIX)]


def forget_server_variables() -> None:
    """Remove these variables from an actor's process before vLLM is imported, for it and its children."""
    for name in (*server_variables(), *_key_variables()):
        os.environ.pop(name, None)


def search_path() -> str:
    """Return the PYTHONPATH with which another Python finds the same modules as this one.

    The working folder is left out unless it was named, or Ridgeline itself is there. Python puts it before its own
    library, also for an empty entry, as `PYTHONPATH=$PYTHONPATH:/my/folder` makes one: a file named queue.py or
    router.py in it would be imported.
    """
    here, ours = Path.cwd(), Path(__file__).resolve().parents[2]  # src/ridgeline/ has links to the folders
    named = {Path(path).absolute() for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}
    found = [Path(path).absolute() for path in sys.path if path]
    return os.pathsep.join(str(path) for path in found if path != here or here in named | {ours})


@contextmanager
def apart_from_the_shell() -> Iterator[None]:
    """Keep from processes of our own, while they start, the variables that would change them or what they import.

    This process has its own again afterwards.
    """
    ours = {"RAY_AUTH_TOKEN": RAY_TOKEN, "PYTHONSAFEPATH": "1", "PYTHONPATH": search_path()}
    names = {*server_variables(), *_key_variables(), *ray_variables(), *ours}
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ |= ours
    try:
        yield
    finally:
        for name in (*ray_variables(), *ours):
            os.environ.pop(name, None)
        os.environ |= before
