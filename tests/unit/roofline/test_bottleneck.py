"""What is short, by a table of planted bottlenecks, and that no sentence contradicts its figures."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.roofline import bottleneck as rule
from ridgeline.roofline.bottleneck import FleetState, PoolState, bottleneck

PREFILL = PoolState("prefill", workers=1, busy=0.5, mfu=0.6, mbu=0.2, kv_used=0.3, running=1, places=8, waiting=0)
DECODE = PoolState("decode", workers=2, busy=0.7, mfu=0.1, mbu=0.7, kv_used=0.5, running=14, places=64, waiting=0)
MIXED = replace(DECODE, pool="colocated")
ENGINE = PoolState("engine", workers=2, busy=0.9, kv_used=0.5, running=8, waiting=0, preemptions=0)
MET = FleetState((PREFILL, DECODE), requests=100, ttft_attainment=1.0, tpot_attainment=1.0)


def pools(*found, **fleet):
    return replace(MET, pools=found, **fleet)


CASES = [
    (pools(PREFILL, DECODE, requests=0), "unknown", None, "none", None),
    (FleetState(requests=9), "unknown", None, "none", None),
    (pools(PREFILL, DECODE, tokens_per_event=1.3), "router", None, "router_processes", None),
    (pools(PREFILL, DECODE, router_cores=0.95), "router", None, "router_processes", None),
    (pools(PREFILL, replace(DECODE, kv_used=0.96, waiting=3)), "kv_blocks", "decode", "kv_memory", None),
    (pools(replace(ENGINE, preemptions=4)), "kv_blocks", "engine", "kv_memory", None),
    (pools(PREFILL, replace(DECODE, kv_used=0.8, refused=3)), "kv_blocks", "decode", "kv_memory", None),
    (pools(PREFILL, replace(DECODE, running=63, waiting=3)), "places", "decode", "max_num_seqs", None),
    (pools(PREFILL, replace(DECODE, busy=0.9), tpot_attainment=0.5), "bandwidth", "decode", "add_worker", None),
    (
        pools(replace(PREFILL, workers=2, busy=0.39), replace(DECODE, busy=0.9), tpot_attainment=0.5),
        *("bandwidth", "decode", "move_worker", "prefill"),
    ),
    (pools(replace(MIXED, busy=0.9, mfu=0.8, waiting=2)), "compute", "colocated", "add_worker", None),
    (pools(replace(MIXED, busy=0.9, mbu=0.3, waiting=2)), "time", "colocated", "add_worker", None),
    (pools(replace(ENGINE, waiting=2)), "time", "engine", "add_worker", None),
    (
        pools(PREFILL, DECODE, link_busy=0.9, handoff_wait_s=0.3, wire_s=0.1),
        *("link", None, "transport", None),
    ),
    (pools(PREFILL, DECODE, link_busy=5.0, handoff_wait_s=0.1, wire_s=3.0), "link", None, "transport", None),
    (pools(PREFILL, DECODE, link_busy=2.0, handoff_wait_s=0.1, wire_s=3.0), "nothing", None, "none", None),
    (pools(PREFILL, replace(DECODE, busy=0.9, slow=False), tpot_attainment=0.5), "unknown", None, "none", None),
    (
        pools(PREFILL, replace(DECODE, busy=0.9, slow=True), tpot_attainment=None),
        *("bandwidth", "decode", "add_worker", None),
    ),
    (pools(replace(PREFILL, busy=0.95, waiting=2), DECODE), "compute", "prefill", "add_worker", None),
    (pools(replace(PREFILL, busy=0.95), DECODE, ttft_attainment=0.4), "compute", "prefill", "add_worker", None),
    (
        pools(replace(PREFILL, busy=0.95, waiting=2), replace(DECODE, busy=0.2, kv_used=0.2)),
        *("compute", "prefill", "move_worker", "decode"),
    ),
    (
        pools(replace(PREFILL, busy=0.95, waiting=2), replace(DECODE, busy=0.2)),
        "compute",
        "prefill",
        "add_worker",
        None,
    ),
    (
        pools(replace(PREFILL, busy=0.7, waiting=2), DECODE, ttft_attainment=0.5),
        "compute",
        "prefill",
        "add_worker",
        None,
    ),
    (
        pools(replace(PREFILL, busy=0.95, waiting=40), replace(DECODE, busy=0.9), tpot_attainment=0.5),
        *("compute", "prefill", "add_worker", None),
    ),
    (pools(PREFILL, replace(DECODE, busy=0.9, running=1.5), tpot_attainment=0.5), "unknown", None, "none", None),
    (pools(replace(PREFILL, busy=0.7, waiting=2), DECODE), "nothing", None, "none", None),
    (pools(replace(PREFILL, waiting=2), DECODE), "queue", "prefill", "none", None),
    (pools(replace(PREFILL, workers=2, busy=0.39), DECODE), "nothing", None, "fewer_workers", "prefill"),
    (pools(PREFILL, DECODE), "nothing", None, "none", None),
    (pools(replace(PREFILL, busy=0.99), DECODE), "nothing", None, "none", None),
    (pools(PREFILL, DECODE, link_busy=0.9, handoff_wait_s=0.1, wire_s=0.3), "nothing", None, "none", None),
    (pools(PREFILL, DECODE, ttft_attainment=0.4), "unknown", None, "none", None),
    (pools(replace(ENGINE, busy=None)), "nothing", None, "none", None),
    (pools(replace(ENGINE, busy=None), tpot_attainment=None), "unknown", None, "none", None),
    (pools(replace(ENGINE, busy=None, waiting=5)), "unknown", None, "none", None),
    (pools(replace(ENGINE, waiting=None)), "unknown", None, "none", None),
    (pools(replace(DECODE, kv_used=None), PREFILL), "unknown", None, "none", None),
]


@pytest.mark.parametrize(("state", "resource", "pool", "change", "giver"), CASES)
def test_a_planted_bottleneck_is_named_with_what_to_change(state, resource, pool, change, giver):
    found = bottleneck(state)
    assert (found.resource, found.pool, found.change, found.giver) == (resource, pool, change, giver)
    assert len(found.sentence.split()) <= 25, found.sentence


def test_the_sentence_has_the_figures():
    state = pools(replace(PREFILL, workers=2, busy=0.39), replace(DECODE, mbu=0.78, busy=0.9), tpot_attainment=0.5)
    assert bottleneck(state).sentence == (
        "Decode is short of memory bandwidth: busy 90% at 78% of peak bytes/s, batch 14; prefill is idle 61%: "
        "move one prefill worker to decode."
    )


def test_the_end_of_the_pipe_is_looked_at_before_its_beginning_and_the_router_first():
    full = pools(replace(PREFILL, busy=1.0, waiting=9), replace(DECODE, kv_used=1.0, waiting=9), router_cores=1.0)
    assert bottleneck(full).resource == "router"
    calm = replace(full, router_cores=0.1)
    assert bottleneck(calm).pool == "decode"
    assert bottleneck(replace(calm, pools=(calm.pools[0], DECODE))).pool == "prefill"


share = st.none() | st.floats(0, 1)
number = st.none() | st.floats(0, 50)
states = st.builds(
    FleetState,
    st.lists(st.sampled_from(["prefill", "decode", "colocated"]), max_size=3, unique=True).flatmap(
        lambda names: st.tuples(
            *(
                st.builds(
                    PoolState,
                    st.just(name),
                    st.none() | st.integers(1, 4),
                    *(share for _ in range(4)),
                    number,
                    st.none() | st.integers(1, 50),
                    number,
                    number,
                )
                for name in names
            )
        )
    ),
    number,
    *(share for _ in range(3)),
    number,
    number,
    share,
    st.none() | st.floats(1, 3),
)


@given(states)
def test_no_sentence_names_what_is_not_short_or_a_change_that_its_figures_contradict(state):
    found, by_name = bottleneck(state), {pool.pool: pool for pool in state.pools}
    pool = by_name.get(found.pool or "")
    assert (found.resource in ("router", "link", "nothing", "unknown")) == (pool is None)
    assert found.sentence.startswith((found.pool or "").capitalize() or ("The", "Nothing", "Only", "Cannot"))
    waits = pool is not None and (pool.waiting or 0) >= rule.WAITING_FROM
    missed = any(
        (met if met is not None else 1) < rule.MIN_ATTAINMENT for met in (state.ttft_attainment, state.tpot_attainment)
    )
    match found.resource:
        case "router":
            assert (state.tokens_per_event or 0) >= rule.TOKENS_AN_EVENT or state.router_cores >= rule.ROUTER_CORES
        case "kv_blocks":
            assert (pool.preemptions or 0) >= 1 or (pool.kv_used >= rule.FULL_FROM and waits)
        case "places":
            assert pool.running / pool.places >= rule.FULL_FROM
            assert waits
        case "bandwidth" | "compute" | "time":
            mfu, mbu = pool.mfu or 0, pool.mbu or 0
            assert pool.busy >= (rule.QUEUED_FROM if waits and missed else rule.BUSY_FROM)
            assert waits or missed
            assert found.resource != "bandwidth" or mbu >= max(mfu, rule.BOUND_FROM)
            assert found.resource != "compute" or mfu >= max(mbu, rule.BOUND_FROM)
            assert found.resource != "time" or max(mfu, mbu) < rule.BOUND_FROM
        case "link":
            assert state.link_busy >= rule.BUSY_FROM
        case "queue":
            assert waits
            assert pool.busy < rule.QUEUED_FROM
        case _:
            held = (each for each in state.pools if (each.waiting or 0) >= rule.WAITING_FROM and each.busy is not None)
            assert state.requests == 0 or all(rule.QUEUED_FROM <= each.busy < rule.BUSY_FROM for each in held)
    if found.giver is not None:
        giver = by_name[found.giver]
        assert giver is not pool
        assert giver.workers >= 2
        assert giver.busy < rule.BUSY_FROM
        assert (giver.waiting or 0) < rule.WAITING_FROM
    assert (found.giver is not None) == (found.change in ("move_worker", "fewer_workers"))
