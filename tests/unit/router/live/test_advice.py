"""The sentence, what would help, and which bar is short, from made-up figures of a fleet."""

import msgspec
import pytest

from ridgeline.roofline.bottleneck import Bottleneck
from ridgeline.router.live.advice import resources, verdict_of
from ridgeline.router.live.state import LinkNow, PoolNow, Promise, PromisedSlo, RouterNow, WorkerNow

MODES = ("disaggregated", "colocated")


def worker(worker_id="worker-0", **changes):
    one = WorkerNow(
        id=worker_id,
        state="ready",
        state_since_s=9.0,
        host="h",
        device=None,
        busy_ratio=0.5,
        prompt_busy_ratio=0.5,
        running=1,
        max_running=4,
        waiting=0,
        kv_used_ratio=0.5,
        kv_pinned_ratio=0.0,
        decode_step_s=0.01,
        steps=[],
        restarts=0,
    )
    return msgspec.structs.replace(one, **changes)


def pool(name, *workers, **changes):
    workers = workers or (worker(),)
    one = PoolNow(
        pool=name,
        hardware=None,
        peak_flops_per_s=None,
        peak_bytes_per_s=None,
        peaks_source=None,
        workers_ready=sum(one.state == "ready" for one in workers),
        workers_wanted=len(workers),
        bound=None,
        mfu_ratio=None,
        mbu_ratio=None,
        busy_ratio=0.5,
        prompt_busy_ratio=0.5,
        tokens_per_s=10.0,
        waiting_prompts=0,
        wait_s=None,
        decode_step_s=0.01,
        mixed_step_s=None,
        kv_blocks=100,
        slo_point=None,
        alone_step_s=None,
        workers=list(workers),
    )
    return msgspec.structs.replace(one, **changes)


def promise(arrivals_per_s=1.0):
    return Promise(
        window_s=60.0,
        sequences=60,
        slo=PromisedSlo(None, None, 0.9),
        ttft_s=None,
        tpot_s=None,
        itl_s=None,
        attainment_ratio=None,
        ttft_attainment_ratio=None,
        tpot_attainment_ratio=None,
        goodput_per_s=None,
        arrivals_per_s=arrivals_per_s,
        finished_per_s=arrivals_per_s,
        refused_per_s=0.0,
        failed_per_s=0.0,
        refused_by={},
    )


SPLIT = [pool("prefill", worker("worker-0")), pool("decode", worker("worker-1"), worker("worker-2"))]


@pytest.mark.parametrize(
    ("found", "kind", "bar", "does", "args"),
    [
        (Bottleneck("router", "s", change="router_processes"), "router", "router", "none", {}),
        (Bottleneck("link", "s", change="transport"), "link", "link", "mode", {"mode": "colocated"}),
        (Bottleneck("compute", "s", "prefill", "add_worker"), "compute", "prefill", "scale", {"prefill": 2}),
        (
            Bottleneck("compute", "s", "prefill", "move_worker", "decode"),
            "compute",
            "prefill",
            "scale",
            {"prefill": 2, "decode": 1},
        ),
        (Bottleneck("bandwidth", "s", "decode", "add_worker"), "bandwidth", "bandwidth", "scale", {"decode": 3}),
        (Bottleneck("kv_blocks", "s", "decode", "kv_memory"), "kv_blocks", "kv", "none", {}),
        (Bottleneck("places", "s", "decode", "max_num_seqs"), "places", "kv", "none", {}),
        (Bottleneck("places", "s", "prefill", "max_num_seqs"), "places", "prefill", "none", {}),
        (Bottleneck("nothing", "s", change="fewer_workers", giver="decode"), "none", None, "scale", {"decode": 1}),
    ],
)
def test_each_bottleneck_names_its_bar_and_what_would_help(found, kind, bar, does, args):
    verdict = verdict_of(found, SPLIT, promise(), MODES)
    assert (verdict.kind, verdict.resource, verdict.sentence) == (kind, bar, "s")
    assert (verdict.action.do, verdict.action.args) == (does, args)
    assert verdict.action.live == (does != "none")


def test_what_cannot_be_told_is_no_reason_to_act():
    verdict = verdict_of(Bottleneck("unknown", "s"), SPLIT, promise(), MODES)
    assert (verdict.severity, verdict.resource, verdict.action) == ("idle", None, None)


def test_an_slo_that_no_batch_meets_is_no_reason_for_more_workers():
    wanted = msgspec.structs.replace(promise(), slo=PromisedSlo(None, 0.1, 0.9), tpot_attainment_ratio=0.2)
    pools = [SPLIT[0], msgspec.structs.replace(SPLIT[1], alone_step_s=0.15)]
    found = Bottleneck("time", "s", "decode", "add_worker")
    verdict = verdict_of(found, pools, wanted, MODES)
    assert "150 ms" in verdict.sentence
    assert verdict.action is None
    assert verdict_of(found, SPLIT, wanted, MODES).sentence == "s"


def test_a_link_is_no_reason_for_a_mode_that_the_deployment_does_not_have():
    found = Bottleneck("link", "s", change="transport")
    assert verdict_of(found, SPLIT, promise(), ("disaggregated",)).action is None


def test_a_lost_worker_comes_before_all_that_is_short():
    pools = [SPLIT[0], pool("decode", worker("worker-1", state="lost", why="no answer"), worker("worker-2"))]
    verdict = verdict_of(Bottleneck("router", "s"), pools, promise(), MODES)
    assert (verdict.kind, verdict.severity, verdict.worker) == ("worker_lost", "fault", "worker-1")
    assert verdict.action.command == "ridgeline logs --worker worker-1"


IDLE = worker("worker-0", running=0)


@pytest.mark.parametrize(
    ("pools", "refused_per_s", "kind"),
    [
        ([pool("prefill", IDLE), pool("decode", IDLE)], 0.0, "empty"),
        ([pool("prefill", IDLE), pool("decode", worker())], 0.0, "none"),
        ([pool("prefill", IDLE, waiting_prompts=1), pool("decode", IDLE)], 0.0, "none"),
        ([pool("prefill", IDLE), pool("decode", IDLE)], 2.0, "none"),
        ([pool("prefill", IDLE), pool("decode", workers_ready=0, workers=[])], 0.0, "worker_lost"),
    ],
    ids=["idle", "a long answer", "a prompt waits", "refused", "no worker"],
)
def test_a_deployment_is_idle_only_if_nothing_runs_waits_or_is_refused(pools, refused_per_s, kind):
    seen = msgspec.structs.replace(promise(0.0), refused_per_s=refused_per_s)
    assert verdict_of(Bottleneck("nothing", "s"), pools, seen, MODES).kind == kind


LINK = LinkNow(
    transport="shm",
    why="",
    bytes_per_s=1e6,
    use_ratio=0.1,
    handoffs_per_s=1.0,
    waiting=0,
    mean_wait_s=None,
    overlapped_ratio=None,
    failed_per_s=0.0,
    expired_per_s=0.0,
)
ROUTER = RouterNow(cpu_ratio=0.85, tokens_per_event=None, loop_lag_s=0.0, in_flight=3)


def test_the_bars_stand_in_the_order_of_a_request_and_the_short_one_is_the_sentences():
    verdict = verdict_of(Bottleneck("kv_blocks", "s", "decode", "kv_memory"), SPLIT, promise(), MODES)
    bars = resources(verdict, promise(), SPLIT, [LINK], ROUTER)
    assert [(bar.id, bar.state) for bar in bars] == [
        ("router", "full"),
        ("prefill", "ok"),
        ("link", "idle"),
        ("kv", "short"),
        ("bandwidth", "idle"),
    ]
    assert [bar.use_ratio for bar in bars] == pytest.approx([0.85, 0.5, 0.1, 0.5, 0.25])


def test_where_no_kv_moves_the_link_is_unused():
    whole = [pool("colocated", worker("worker-0"), worker("worker-1"))]
    verdict = verdict_of(Bottleneck("nothing", "s"), whole, promise(), MODES)
    link = resources(verdict, promise(), whole, [], ROUTER)[2]
    assert (link.use_ratio, link.state) == (None, "unused")
