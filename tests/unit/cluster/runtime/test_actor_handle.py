"""An actor that Ray does not place, or that does not answer: given up after what the configuration says."""

import asyncio
import threading
import time

import pytest
from ray.exceptions import ActorUnavailableError

from ridgeline.cluster.config.loader import load_config
from ridgeline.cluster.runtime.handles import actor
from ridgeline.cluster.runtime.handles.actor import ActorHandle, DeploymentFailed, NoPlace
from ridgeline.cluster.runtime.handles.routing import reachable


class Silent:
    """A handle whose calls nobody answers."""

    def __getattr__(self, method):
        return self

    def remote(self, *_):
        return asyncio.get_running_loop().create_future()


def handle(**settings):
    return ActorHandle(
        "worker-1", Silent(), load_config(None, {k.replace("__", "."): v for k, v in settings.items()}).config
    )


class Answers(Silent):
    """One that answers at once, or when it is told to, from another thread, as Ray's do; or not the first questions."""

    def __init__(self, *, later=False, unanswered=0, unavailable=0):
        self.later, self.unanswered, self.unavailable = later, unanswered, unavailable
        self.asked, self.open = [], []

    def remote(self, *question):
        self.asked.append(question)
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        if len(self.asked) <= self.unavailable:
            answer.set_exception(ActorUnavailableError("its connection broke", None))
        elif len(self.asked) > self.unavailable + self.unanswered:
            if self.later:
                self.open.append(lambda: loop.call_soon_threadsafe(answer.set_result, ""))
            else:
                answer.set_result("")
        return answer


def stand_still(seconds, *several):
    """As this process does after SIGSTOP: another thread, like Ray's, takes the answers that come meanwhile."""
    takes = threading.Thread(target=lambda: [tell() for answers in several for tell in answers.open])
    takes.start()
    time.sleep(seconds)
    takes.join()


def asking(answers):
    one = handle()
    one._actor = answers
    return one


async def test_after_the_driver_stood_still_the_answers_that_came_meanwhile_count(monkeypatch):
    monkeypatch.setattr(actor, "ANSWER_WITHIN_S", 1.0)
    several = [Answers(later=True) for _ in range(5)]
    answers = [asyncio.ensure_future(asking(one).failure()) for one in several]
    while not all(one.asked for one in several):  # noqa: ASYNC110 - as many turns as that needs, and no time
        await asyncio.sleep(0)
    stand_still(2.0, *several)  # far longer than anybody may take
    assert await asyncio.gather(*answers) == [""] * 5
    assert [one.asked for one in several] == [[()]] * 5


async def test_a_call_in_progress_survives_a_driver_that_stands_still():
    answers = Answers(later=True)
    calling = asyncio.ensure_future(asking(answers).call("drain", timeout_s=0.5))
    while not answers.asked:  # noqa: ASYNC110 - the same
        await asyncio.sleep(0)
    stand_still(1.0, answers)
    assert await calling == ""


async def test_an_actor_is_asked_twice_before_it_counts_as_unreachable(monkeypatch):
    monkeypatch.setattr(actor, "ANSWER_WITHIN_S", 0.1)
    once, never = Answers(unanswered=1), Answers(unanswered=9)
    assert await asking(once).failure() == ""
    assert len(once.asked) == 2
    assert await asking(never).failure() == "unreachable"
    assert len(never.asked) == 2


async def test_a_connection_that_broke_while_the_driver_stood_still_is_made_anew(monkeypatch):
    monkeypatch.setattr(actor, "RETRY_S", 0.0)
    assert await asking(Answers(unavailable=3)).failure() == ""


@pytest.mark.parametrize(
    ("setting", "call", "kind", "named"),
    [
        ("ray__placement_timeout_s", lambda one: one.find_place(), NoPlace, "ray.placement_timeout_s"),
        (
            "supervision__start_timeout_s",
            lambda one: one.call("start"),
            DeploymentFailed,
            "supervision.start_timeout_s",
        ),
        ("supervision__start_timeout_s", lambda one: one.call("drain", timeout_s=0.01), DeploymentFailed, "drain"),
    ],
    ids=["place", "start", "a_limit_of_its_own"],
)
async def test_what_takes_too_long_is_given_up_and_the_setting_named(monkeypatch, setting, call, kind, named):
    monkeypatch.setattr(actor, "LISTEN_S", 0.001)
    waiting = handle(**{setting: "10"})
    waiting._placement_timeout_s = waiting._start_timeout_s = 0.01
    with pytest.raises(kind, match="worker-1") as given_up:
        await call(waiting)
    assert named in str(given_up.value)
    assert ("(" in str(given_up.value)) is (named != "drain")


def test_a_joined_cluster_is_given_the_time_its_nodes_need_to_boot():
    alone, joined = load_config().config, load_config(None, {"ray.address": "auto"}).config
    assert (alone.ray.patience_s, joined.ray.patience_s) == (120, 1800)
    assert load_config(None, {"ray.address": "auto", "ray.placement_timeout_s": "7"}).config.ray.patience_s == 7


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://0.0.0.0:8000", "http://10.0.0.7:8000"),
        ("http://[::]:8000", "http://10.0.0.7:8000"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://a-node.example:80", "http://a-node.example:80"),
    ],
)
def test_a_server_on_all_addresses_is_told_at_its_nodes(url, told):
    assert reachable(url, "10.0.0.7") == told


async def test_while_it_has_no_place_launches_of_nodes_are_told_whenever_they_change(monkeypatch):
    news = iter(["one is launched", "one is launched", "", "it failed"])
    monkeypatch.setattr(actor, "ask_autoscaler", lambda: next(news, ""))
    monkeypatch.setattr(actor, "TELL_EVERY_S", 0.001)
    waiting, told = handle(), []
    waiting._placement_timeout_s, waiting.tell = 0.5, told.append
    with pytest.raises(NoPlace):
        await waiting.find_place()
    assert told == [
        "worker-1 waits for a node; one is launched",
        "worker-1 waits for a node; it failed",
    ]
