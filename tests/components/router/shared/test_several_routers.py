"""Several routers with one dispatcher: windows, slots, order and limits hold in sum; losing one loses little."""

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from ridgeline.contracts.errors import AdapterRefused
from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.fleet.request_route import NoWorker
from ridgeline.router.fleet.roles import ModeImpossible
from ridgeline.router.fleet.worker import Outstanding
from ridgeline.router.flow.admission_rules import Ask, Refused
from ridgeline.router.scheduler.offline_simulation import recorded
from ridgeline.router.scheduler.recorded_events import read_recording
from ridgeline.router.scheduler.replay import replay
from ridgeline.router.shared.link import NoDispatcher
from ridgeline.router.watching import Wanted
from tests.components.router.dispatch.test_modes import ROLES
from tests.support.patience import PATIENCE_S, eventually
from tests.support.samples import LAYOUT, next_token, router_settings
from tests.support.series_table import STEP_MODEL
from tests.support.several_routers import PROMPT_TOKENS, a_dispatcher, routers
from tests.support.small_fleet import hosts

LAYOUTS = {"prefill": LAYOUT, "decode": LAYOUT}
ONE_PROMPT: dict[Pool, int] = {"prefill": 1, "decode": 1, "colocated": 1, "adaptive": 1}
"""Windows that one prompt fills."""
SETTINGS = router_settings(routers=2, roles=ROLES.by_mode)
NARROW = replace(SETTINGS, prefill_window_tokens=ONE_PROMPT)


def expected(tokens, prompt=PROMPT_TOKENS):
    """The answer of the fake engines."""
    context = list(range(prompt))
    for _ in range(tokens):
        context.append(next_token(context))
    return context[prompt:]


def engine(started, name="prefill-0"):
    return next(host._engine for host in started if host._engine.config.worker_id == name)


def stop_steps(started, name="prefill-0"):
    """From now on this engine makes a step only when told."""
    engine(started, name)._stepping = "manual"


async def test_the_dispatcher_knows_what_is_in_use_by_all_routers_and_which_prompts_wait():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started:
        addresses = [host.address for host in started]
        stop_steps(started)
        async with a_dispatcher(addresses, NARROW) as (dispatcher, at), routers(2, addresses, at, NARROW) as pair:
            asked = [router.ask(tokens=2) for router in pair]
            await waits(dispatcher, 1)
            load = await dispatcher.load(60.0)
            assert (load.mode, load.pools, load.waiting_prompts) == ("disaggregated", ("prefill", "decode"), 2)
            assert [one.output_tokens for one in load.requests] == [1, 1], "half of the longest length"
            assert not load.is_whole
            engine(started)._stepping = "auto"
            engine(started).step()
            for _, request in asked:
                await request
            await all_is_given_back(dispatcher)
            load = await dispatcher.load(60.0)
            assert load.waiting_prompts == 0
            assert [one.output_tokens for one in load.requests] == [2, 2]


async def all_is_given_back(dispatcher):
    """A client has its last token before the dispatcher has its router's last message."""
    await eventually(lambda: all(worker.outstanding == Outstanding() for worker in dispatcher.fleet.workers))


async def waits(dispatcher, number):
    await eventually(lambda: dispatcher._state.queues["prefill"].waiting == number)


async def test_both_routers_serve_through_both_workers_and_give_the_tokens_of_one_engine():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started:
        addresses = [host.address for host in started]
        async with a_dispatcher(addresses, SETTINGS) as (_, at), routers(2, addresses, at, SETTINGS) as pair:
            asked = [router.ask() for router in pair for _ in range(4)]
            for sent, request in asked:
                await request
                assert sent == expected(5)
            paths = [
                sample.labels["path"]
                for family in pair[0].registry.collect()
                for sample in family.samples
                if sample.name == "ridgeline_requests_total"
            ]
            assert paths == ["disaggregated"]


async def test_an_adapter_loaded_through_one_router_can_be_chosen_at_all_and_after_a_change_of_dispatcher():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started:
        addresses = [host.address for host in started]
        for host in started:
            host._engine.adapter_digests = {"/sql": "v1", "/chat": "v1"}
        settings = replace(SETTINGS, lora_modules=[{"name": "chat", "path": "/chat"}])
        async with a_dispatcher(addresses, settings) as (_, at), routers(2, addresses, at, settings) as pair:
            assert [[*router.fleet.adapters] for router in pair] == [["chat"], ["chat"]]
            await pair[0].decisions.adapters.load("sql", "/sql", in_place=False)
            await eventually(lambda: all({"chat", "sql"} == {*router.fleet.adapters} for router in pair))
            with pytest.raises(AdapterRefused, match="load_inplace"):
                await pair[1].decisions.adapters.load("sql", "/sql", in_place=False)
            with pytest.raises(AdapterRefused, match="prefill-0"):
                await pair[1].decisions.adapters.load("none", "/none", in_place=False)
            assert await pair[1].decisions.adapters.unload("chat")
            await eventually(lambda: all({"sql"} == {*router.fleet.adapters} for router in pair))
        async with a_dispatcher(addresses, SETTINGS) as (_, at), routers(2, addresses, at, SETTINGS) as pair:
            assert [[*router.fleet.adapters] for router in pair] == [["sql"], ["sql"]]


async def test_a_prefill_window_holds_for_the_prompts_of_both_routers_together():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started:
        addresses = [host.address for host in started]
        stop_steps(started)
        async with a_dispatcher(addresses, NARROW) as (dispatcher, at), routers(2, addresses, at, NARROW) as pair:
            asked = [router.ask(tokens=2) for router in pair]
            await waits(dispatcher, 1)
            await eventually(lambda: engine(started).calls)
            await eventually(lambda: pair[0].decisions.waits["prefill"].waiting.prompts == 1)
            assert len(engine(started).calls) == 1, "the other router's prompt waits, though its router has sent none"
            await eventually(lambda: pair[1].decisions.waits["prefill"].waiting.prompts == 1)
            engine(started)._stepping = "auto"
            engine(started).step()
            for _, request in asked:
                await request


async def test_a_client_that_floods_one_router_does_not_keep_the_clients_of_the_other_waiting():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started:
        addresses = [host.address for host in started]
        stop_steps(started)
        async with a_dispatcher(addresses, NARROW) as (dispatcher, at), routers(2, addresses, at, NARROW) as pair:
            flood = [pair[0].ask(client="greedy", prompt=600)[1] for _ in range(6)]
            await waits(dispatcher, 5)
            _, polite = pair[1].ask(client="polite", tokens=1)
            await waits(dispatcher, 6)
            for _ in range(2):  # the prompt that has begun, and then one of each client
                calls = len(engine(started).calls)
                engine(started).step()
                await eventually(lambda calls=calls: len(engine(started).calls) > calls)
            assert "router-1" in " ".join(call.request_id for call in engine(started).calls[:3])
            for request in (*flood, polite):
                request.cancel()
            await asyncio.wait((*flood, polite))


async def test_what_a_router_held_is_free_again_when_it_dies():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started:
        addresses = [host.address for host in started]
        stop_steps(started)
        async with a_dispatcher(addresses, NARROW) as (dispatcher, at), routers(2, addresses, at, NARROW) as pair:
            _, first = pair[0].ask()
            await eventually(lambda: engine(started).calls)
            sent, second = pair[1].ask(tokens=3)
            await waits(dispatcher, 1)
            first.cancel()
            await pair[0].die()
            await waits(dispatcher, 0)
            engine(started)._stepping = "auto"
            engine(started).step()
            await second
            assert sent == expected(3)
            await eventually(lambda: not any(worker.outstanding.running for worker in dispatcher.fleet.workers))


async def test_streams_go_on_without_a_dispatcher_and_the_next_one_learns_which_places_are_in_use():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started:
        addresses = [host.address for host in started]
        stop_steps(started)
        stop_steps(started, "decode-0")
        async with a_dispatcher(addresses, NARROW) as (former, at), routers(2, addresses, at, NARROW) as pair:
            sent, decoding = pair[0].ask(tokens=3)
            await eventually(lambda: engine(started).running)
            engine(started).step()
            await eventually(lambda: engine(started, "decode-0").running)
            _, prefilling = pair[0].ask(tokens=3)
            await eventually(lambda: engine(started).running)
            late, waiting = pair[1].ask(tokens=3)
            await waits(former, 1)
            await former.stop()
            await eventually(lambda: all(router.decisions.link.away_s for router in pair))
            engine(started, "decode-0").step()
            await eventually(lambda: len(sent) == 2)
            assert not waiting.done()
            async with a_dispatcher(addresses, NARROW) as (dispatcher, there):
                for router in pair:
                    await router.decisions.link.follow(there)
                await waits(dispatcher, 1)
                await eventually(lambda: len(dispatcher._routers) == 2)
                prefill, decode = (dispatcher.fleet.get(name).outstanding for name in ("prefill-0", "decode-0"))
                assert (prefill.prompt_tokens, prefill.running) == (PROMPT_TOKENS, 1)
                assert decode.running == 2, "the one that is decoded, and the one that will be"
                for one in started:
                    one._engine._stepping = "auto"
                    one._engine.step()
                await asyncio.gather(decoding, prefilling, waiting)
                assert (sent, late) == (expected(3), expected(3))
                await eventually(lambda: prefill.running == decode.running == 0)


async def test_a_prompt_that_no_dispatcher_takes_ends_with_a_sentence():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started:
        addresses = [host.address for host in started]
        settings = router_settings(SETTINGS, recovery_timeout_s=0.5)
        async with a_dispatcher(addresses, settings) as (dispatcher, at), routers(1, addresses, at, settings) as (one,):
            await dispatcher.stop()
            _, request = one.ask()
            with pytest.raises(
                NoWorker, match=r"there has been no dispatcher at .* \(router.recovery_timeout_s\): retry"
            ):
                await request


async def test_admission_counts_what_the_other_router_has_accepted():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started:
        addresses = [host.address for host in started]
        async with a_dispatcher(addresses, SETTINGS) as (_, at), routers(2, addresses, at, SETTINGS) as pair:
            tickets = [pair[0].admission.admit("a", Ask(1, 8, 8)) for _ in range(10)]
            await eventually(lambda: pair[1].admission.others.all.sequences == 10)
            with pytest.raises(Refused, match="10 requests are being served"):
                pair[1].admission.admit("b", Ask(1, 8, 8))
            for ticket in tickets:
                ticket.release()
            await eventually(lambda: pair[1].admission.others.all.sequences == 0)
            pair[1].admission.admit("b", Ask(1, 8, 8)).release()


async def test_a_clients_share_counts_at_all_routers_together():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started:
        addresses = [host.address for host in started]
        settings = router_settings(SETTINGS, max_client_share=0.5)
        async with a_dispatcher(addresses, settings) as (_, at), routers(2, addresses, at, settings) as pair:
            tickets = [pair[0].admission.admit("a", Ask(1, 8, 8)) for _ in range(5)]
            await eventually(lambda: "a" in pair[1].admission.others.of_client)
            with pytest.raises(Refused, match="you may have"):
                pair[1].admission.admit("a", Ask(1, 8, 8))
            pair[1].admission.admit("b", Ask(1, 8, 8)).release()
            tickets.clear()


async def test_in_mode_adaptive_the_dispatcher_chooses_by_prediction_for_both_routers_and_the_tokens_are_one_engines():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started:
        for host in started:
            host._engine.stats.step_model = STEP_MODEL
        addresses = [host.address for host in started]
        async with a_dispatcher(addresses, SETTINGS) as (dispatcher, at), routers(2, addresses, at, SETTINGS) as pair:
            await pair[0].decisions.modes.change("adaptive")
            await dispatcher.fleet.refresh()
            asked = [router.ask(tokens=6) for _ in range(6) for router in pair]
            for sent, request in asked:
                await request
                assert sent == expected(6)
            counted = generate_latest(pair[0].registry).decode() + generate_latest(pair[1].registry).decode()
            assert 'ridgeline_decisions_total{choice="' in counted
            await all_is_given_back(dispatcher)
            load = await dispatcher.load(60.0)
            assert (load.mode, load.pools, len(load.fleet.workers)) == ("adaptive", ("adaptive", "adaptive"), 2)


async def test_any_router_streams_a_recording_of_what_the_dispatcher_decides_for_all():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started:
        for host in started:
            host._engine.stats.step_model = STEP_MODEL
        addresses = [host.address for host in started]
        async with a_dispatcher(addresses, SETTINGS) as (dispatcher, at), routers(2, addresses, at, SETTINGS) as pair:
            await pair[0].decisions.modes.change("adaptive")
            await dispatcher.fleet.refresh()
            lines = []

            async def record():
                async for some in pair[1].decisions.record(Wanted(60.0, 1 << 20)):
                    lines.append(some)  # noqa: PERF401 - others look at it meanwhile

            recording = asyncio.create_task(record())
            await eventually(lambda: lines)
            for router in pair:
                await router.ask(tokens=6)[1]
            await eventually(lambda: b"".join(lines).count(b'"answered"') == 2)
            recording.cancel()
            await asyncio.wait((recording,))
            events = [*read_recording(b"".join(lines).splitlines(keepends=True), "it")]
            made = replay(events)
            assert (made.placements, made.differences) == (2, [])
            assert [one.output_tokens for one in recorded(events).requests] == [6, 6]


async def test_a_recording_ends_with_a_sentence_when_the_dispatcher_is_lost():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started:
        addresses = [host.address for host in started]
        async with a_dispatcher(addresses, SETTINGS) as (dispatcher, at), routers(1, addresses, at, SETTINGS) as pair:
            recording = pair[0].decisions.record(Wanted(60.0, 1 << 20))
            assert await anext(recording)
            await dispatcher.stop()
            with pytest.raises(NoDispatcher, match="has ended Record"):
                await anext(recording)


async def test_a_change_of_mode_at_one_router_changes_it_at_all():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started:
        addresses = [host.address for host in started]
        async with a_dispatcher(addresses, SETTINGS) as (_, at), routers(2, addresses, at, SETTINGS) as pair:
            change = await pair[1].decisions.modes.change("colocated")
            assert change.mode == "colocated"
            for router in pair:
                await eventually(lambda router=router: router.decisions.modes.mode == "colocated")
                sent, request = router.ask()
                await request
                assert sent == expected(5)
                assert {worker.pool for worker in router.fleet.workers} == {"colocated"}


async def test_a_mode_that_is_impossible_is_refused_with_the_reason():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started:
        addresses = [host.address for host in started]
        settings = router_settings(routers=2, why_not={"colocated": "fixed_mode is set"})
        async with a_dispatcher(addresses, settings) as (_, at), routers(1, addresses, at, settings) as (router,):
            with pytest.raises(ModeImpossible, match="fixed_mode is set"):
                await router.decisions.modes.change("colocated")


async def test_a_worker_that_only_one_router_does_not_reach_gets_the_requests_of_the_other():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS, decode_1=LAYOUT) as started:
        addresses = [host.address for host in started]
        async with a_dispatcher(addresses, SETTINGS) as (_, at), routers(2, addresses, at, SETTINGS) as pair:
            cut_off = pair[0].fleet.get("decode-1")
            cut_off.client._attached.clear()  # as after a broken connection
            stop_steps(started, "decode-0")
            held = [pair[0].ask(tokens=2)[1] for _ in range(2)]
            await eventually(lambda: len(engine(started, "decode-0").running) == 2)
            sent, request = pair[1].ask()
            await request
            assert sent == expected(5)
            assert len(engine(started, "decode-1").calls) == 1, "it has least to do"
            engine(started, "decode-0").step()
            await asyncio.gather(*held)


async def test_a_router_that_sends_nonsense_ends_its_own_connection_only():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started:
        addresses = [host.address for host in started]
        async with a_dispatcher(addresses, SETTINGS) as (dispatcher, at), routers(2, addresses, at, SETTINGS) as pair:
            await eventually(lambda: len(dispatcher._routers) == 2)
            pair[0].decisions.link.send("nonsense")
            await eventually(lambda: pair[0].decisions.link.away_s == 0 and len(dispatcher._routers) == 2)
            for router in pair:
                await router.ask()[1]


async def test_a_prompt_whose_placement_fails_in_the_dispatcher_is_refused_at_once_and_the_next_one_is_served():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started:
        addresses = [host.address for host in started]
        async with a_dispatcher(addresses, SETTINGS) as (dispatcher, at), routers(1, addresses, at, SETTINGS) as (one,):
            route_of = dispatcher._state.route_of
            dispatcher._state.route_of = lambda _: 1 / 0
            with pytest.raises(NoWorker, match=r"failed to place the prompt \(ZeroDivisionError: .*\): see its log"):
                await one.ask()[1]
            dispatcher._state.route_of = route_of
            sent, request = one.ask()
            await request
            assert sent == expected(5)


async def test_a_message_that_fails_in_the_dispatcher_ends_no_connection():
    async with asyncio.timeout(PATIENCE_S), hosts(**LAYOUTS) as started:
        addresses = [host.address for host in started]
        async with a_dispatcher(addresses, SETTINGS) as (dispatcher, at), routers(1, addresses, at, SETTINGS) as (one,):
            (joined,) = dispatcher._routers
            failed = asyncio.Event()

            def fails():
                failed.set()
                raise ZeroDivisionError

            dispatcher._state._learned.prefixes.forget_all = fails
            one.decisions.placement.forget_prefixes()
            await failed.wait()
            await one.ask()[1]
            assert dispatcher._routers == {joined}, "the same connection"
