"""What is handed to vLLM."""

import json
import multiprocessing
import os
import signal
from dataclasses import fields, replace
from types import SimpleNamespace

import msgspec
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from ridgeline.contracts.errors import AdapterRefused, EngineFailed
from ridgeline.contracts.rpc.tls import TlsFiles
from ridgeline.contracts.workers import StepModel
from ridgeline.engine.connector.messages import STALE_HANDOFFS, STEP_MODEL, TRANSFER_EVENTS
from ridgeline.engine.root_cause import CauseFile
from ridgeline.engine.vllm_engine import EngineStats, VllmEngine, _engine_args
from ridgeline.kv_transfer.options import TransferOptions
from tests.support.patience import PATIENCE_S
from tests.support.samples import engine_config

IDLE = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_skipped_waiting_reqs": 0, "kv_cache_usage": 0.0}
UNUSUAL = TransferOptions(
    host="10.0.0.9",
    port=7001,
    transport="grpc",
    lease_s=7.0,
    kv_fetch_timeout_s=11.5,
    faults="seed=7,drop=0.02",
    tls=TlsFiles("ca.pem", "cert.pem", "key.pem"),
)


def test_every_option_of_the_hand_off_reaches_the_connector_as_it_was_planned():
    usual = TransferOptions("127.0.0.1")
    same = [field.name for field in fields(UNUSUAL) if getattr(UNUSUAL, field.name) == getattr(usual, field.name)]
    assert same == [], "a field with its default would prove nothing"
    args = _engine_args(replace(engine_config(), transfer=UNUSUAL))
    told = json.loads(json.dumps(args["kv_transfer_config"].kv_connector_extra_config))
    assert msgspec.convert(told["transfer"], TransferOptions) == UNUSUAL


def test_the_step_target_of_a_pool_reaches_the_scheduler_of_its_engine():
    args = _engine_args(replace(engine_config(), step_target_s=0.09))
    assert args["kv_transfer_config"].kv_connector_extra_config["step_target_s"] == 0.09


def test_the_newest_step_model_is_kept_beside_the_counters():
    model = StepModel(
        base_s=0.05,
        per_prefill_token_s=0.004,
        per_sequence_s=0.001,
        per_context_token_s=1e-6,
        per_attended_token_s=1e-6,
        corrections=(1.0, 0.9),
    )
    stats = EngineStats(None)
    for sent in ({STEP_MODEL: msgspec.to_builtins(model)}, {}):
        figures = {"steps_total.decode": 1.0, TRANSFER_EVENTS: [], STALE_HANDOFFS: [], **sent}
        stats.record(SimpleNamespace(kv_connector_stats=figures, **IDLE), None)
        assert (stats.step_model, stats.counters) == (model, {"steps_total.decode": 1.0})


@pytest.fixture
def ended_engine(tmp_path):
    """One whose process a signal has just ended, and whose front end knows only that.

    The process is spawned: a forked one has pytest's handler of SIGILL, which may die of another signal on its way.
    """
    process = multiprocessing.get_context("spawn").Process(target=signal.pause)
    process.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGILL)
    process.join(PATIENCE_S)

    async def generate(*args, **kwargs):
        raise EngineDeadError
        yield

    engine = VllmEngine(engine_config())
    manager = SimpleNamespace(processes=[process])
    core = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))
    model = SimpleNamespace(get_vocab_size=lambda: 10)
    engine._llm = SimpleNamespace(errored=True, engine_core=core, model_config=model, generate=generate)
    engine._cause = CauseFile(str(tmp_path), "decode-0-i1")
    return engine


async def test_a_request_on_an_engine_that_was_ended_is_told_by_what_and_not_sent_to_a_log(ended_engine):
    assert ended_engine.ending.startswith("its engine process was ended by SIGILL")
    with pytest.raises(EngineFailed) as failed:
        await anext(ended_engine.generate("r1", [1, 2], SamplingParams()))
    assert str(failed.value) == (
        "the engine of decode-0 failed: its engine process was ended by SIGILL "
        "(an instruction that this machine does not allow)"
    )


@pytest.mark.parametrize("path", ["x" * 5000, "/" + "x" * 5000])
async def test_a_path_that_no_folder_can_have_is_an_adapter_that_is_refused(path):
    engine = VllmEngine(engine_config())
    model = SimpleNamespace(hf_text_config=SimpleNamespace(to_dict=dict))
    config = SimpleNamespace(lora_config=SimpleNamespace(max_lora_rank=16))
    engine._llm = SimpleNamespace(vllm_config=config, model_config=model)
    with pytest.raises(AdapterRefused):
        await engine.load_adapter("sql", path)
