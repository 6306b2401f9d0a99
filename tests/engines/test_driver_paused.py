"""The driver stands still under load, as under `docker pause`, Ctrl-Z or swap: it must blame nobody else for that."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.engines.serve_process import body, serving
from tests.engines.served import Deployed, Stream

Figure = Callable[[str], None]
pytestmark = pytest.mark.engines

SETTINGS = {
    "model.dtype": "float32",  # texts are compared: in bfloat16 a batch of another size may break ties another way
    "ray.share_cores": "true",
    "model.max_model_len_tokens": "1024",
    **{f"pools.{pool}.kv_cache_bytes": "128 MiB" for pool in ("prefill", "decode")},
    **{f"pools.{pool}.max_num_seqs": "8" for pool in ("prefill", "decode")},
}
TOKENS = 40
STREAMS = 2
AFTER_S = 45.0
"""As long as a judgement of what was asked before the pause, and one of what is asked right after it, could take."""


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    settings = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    with serving("--prefill", "1", "--decode", "1", *settings) as serve:
        one = Deployed(serve, serve.wait_ready())
        one.completes()
        yield one


def processes(deployed: Deployed) -> set[tuple[int, float]]:
    """The router, the workers and their engines, each by pid and start time."""
    workers = [psutil.Process(row["pid"]) for row in deployed.workers().values()]
    engines = [deployed.engine(name) for name in deployed.workers()]
    return {(one.pid, one.create_time()) for one in (deployed.router(), *workers, *engines)}


@pytest.mark.parametrize("pause_s", [25.0, pytest.param(120.0, marks=pytest.mark.long)])
def test_while_the_driver_stands_still_and_when_it_goes_on_no_worker_and_no_stream_ends(
    deployed: Deployed, figure: Figure, pause_s: float
):
    greedy = {**body(TOKENS), "temperature": 0}
    whole = httpx.post(f"{deployed.url}/v1/completions", json=greedy, timeout=120).json()["choices"][0]["text"]
    before, said = processes(deployed), len(deployed.serve.lines)
    over_s = time.monotonic() + pause_s + AFTER_S

    def one_after_the_other(_: int) -> list[Stream]:
        streams: list[Stream] = []
        while time.monotonic() < over_s:
            streams.append(Stream(deployed.url, TOKENS, temperature=0))
            streams[-1].end()
        return streams

    with ThreadPoolExecutor(STREAMS) as pool:
        load = [pool.submit(one_after_the_other, number) for number in range(STREAMS)]
        deployed.serve.process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(pause_s)
        finally:
            deployed.serve.process.send_signal(signal.SIGCONT)
        streams = [stream for one in load for stream in one.result()]
    assert [line for line in deployed.serve.lines[said:] if "gone" in line] == []
    assert processes(deployed) == before
    assert {stream.end()[-1] for stream in streams} == {"data: [DONE]"}
    assert {stream.text() for stream in streams} == {whole}, "no token is lost or wrong"
    figure(f"{len(streams)} streams of {TOKENS} tokens while the driver stood still for {pause_s:.0f} s, and after")
    deployed.completes()
