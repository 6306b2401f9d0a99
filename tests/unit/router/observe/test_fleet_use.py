"""What is read of a worker for whoever scales pools."""

from types import SimpleNamespace

from ridgeline.contracts.workers import WorkerStatus
from ridgeline.router.observe.fleet_use import WorkerUse, fleet_use


def worker(status):
    held = SimpleNamespace(running=3, promised_blocks=5)
    return SimpleNamespace(
        worker_id="worker-0",
        pool="prefill",
        description=SimpleNamespace(incarnation="i", num_kv_blocks=100),
        status=status,
        usable=True,
        outstanding=held,
        max_num_seqs=8,
        kv_blocks_free=60,
    )


def test_a_workers_use_is_what_it_runs_holds_and_has_computed_prompts_for():
    counters = {
        f"busy_seconds_total.{kind}": seconds for kind, seconds in (("prefill", 4), ("mixed", 2), ("decode", 9))
    }
    status = WorkerStatus(worker_id="worker-0", counters=counters)
    use = fleet_use([worker(status)], {"prefill": 7})
    assert use.waiting_prompts == {"prefill": 7}
    assert use.workers == (
        WorkerUse("worker-0", "i", "prefill", True, 6.0, running=3, places=8, kv_blocks_used=45, kv_blocks=100),
    )


def test_a_worker_that_does_not_answer_is_not_usable():
    [use] = fleet_use([worker(None)], {}).workers
    assert not use.usable
    assert use.prompt_steps_s == 0.0
