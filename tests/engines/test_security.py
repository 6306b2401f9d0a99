"""A real deployment with certificates and an API key: it serves, it refuses, and nothing of it listens to the world."""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ridgeline.contracts.errors import WorkerLost
from ridgeline.worker_runtime.client import WorkerClient
from tests.engines.conftest import SHORT_STEPS, deployed
from tests.support.certificates import Authority

pytestmark = pytest.mark.engines
KEY = "a-key-for-this-test-only"
BODY = {"prompt": "Light is", "max_tokens": 8, "temperature": 0}


def listening() -> dict[str, str]:
    """Address and port of every TCP socket that this process and all below it listen on, with the program's name."""
    found = {}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # a helper has ended meanwhile
            for each in process.net_connections(kind="tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found[f"{each.laddr.ip}:{each.laddr.port}"] = " ".join(process.cmdline())[:60] or process.name()
    return found


async def test_with_certificates_and_a_key_it_serves_its_own_and_refuses_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_model: dict[str, str]
):
    monkeypatch.setenv("RIDGELINE_API_KEYS", KEY)
    tls = Authority(tmp_path).issue()
    files = {f"security.tls.{name}": getattr(tls, name) for name in ("ca_file", "cert_file", "key_file")}
    async with deployed({**files, "transfer.transport": "grpc", **SHORT_STEPS, **small_model}, tls) as engines:
        model = {"model": engines.model}
        refused = await engines.http.post("/v1/completions", json={**model, **BODY})
        assert refused.status_code == 401
        answer = await engines.http.post("/v1/completions", json={**model, **BODY}, headers={"x-api-key": KEY})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
        assert not _told(answer, "handoff", "kv_transfer_params")
        metrics = (await engines.http.get("/metrics")).text
        assert 'ridgeline_requests_total{outcome="finished",path="disaggregated"} 1.0' in metrics
        assert 'transport="grpc"' in metrics
        assert (await engines.http.get("/health")).status_code == 200
        for path in ("/v1/models", "/version", "/openapi.json", "/docs", "/load", "/metrics/"):
            assert (await engines.http.get(path)).status_code == 401, path
        long = await engines.http.post("/tokenize", content=bytes(9 << 20), headers={"x-api-key": KEY})
        assert long.status_code == 413
        stranger = WorkerClient(engines.decode.address, "stranger")
        with pytest.raises(WorkerLost, match=r"security\.tls"):
            await stranger.describe()
        await stranger.close()
        assert processes_told("ray::"), "they can be read"
        assert processes_told(KEY) == []
        sockets = listening()
        wide = {where: who for where, who in sockets.items() if not _is_loopback(where)}
        assert not wide, wide


def processes_told(secret: str) -> list[str]:
    """Those below this one in whose arguments or environment the secret stands, by name."""
    told = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any(secret in word for word in (*process.cmdline(), *process.environ().values())):
                told.append(process.name())
    return told


def _told(answer: httpx.Response, *words: str) -> list[Any]:
    """Fields of the answer that have one of these names and a value."""
    return [value for name, value in answer.json().items() if value is not None and any(word in name for word in words)]


def _is_loopback(where: str) -> bool:
    return ipaddress.ip_address(where.rpartition(":")[0].removeprefix("::ffff:")).is_loopback
