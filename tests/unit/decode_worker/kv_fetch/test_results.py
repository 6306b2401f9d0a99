"""Each completion is taken once, whoever takes it first."""

from ridgeline.contracts.handoff import TransferResult
from ridgeline.decode_worker.kv_fetch.results import CompletionBoard

OK = TransferResult(outcome="ok")
FAILED = TransferResult(outcome="failed", reason="timeout")


def test_what_has_arrived_is_taken_alone_and_what_failed_is_left_to_the_next_step():
    board = CompletionBoard()
    for name, result in (("a", OK), ("b", FAILED)):
        board.begin(name)
        board.finish(name, result)
    board.begin("c")
    assert board.take_arrived() == {"a": OK}
    assert board.take_arrived() == {}
    done = board.take(set())
    assert (done.received, done.failed) == ({"b"}, {"b"})
    board.finish("c", OK)
    assert board.take(set()).received == {"c"}
    assert board.take_arrived() == {}


def test_whoever_waits_elsewhere_is_told_of_each_completion_when_it_can_be_taken():
    taken = []
    board = CompletionBoard(on_news=lambda: taken.append(board.take(set()).received))
    board.begin("a")
    board.finish("a", OK)
    board.wake()
    assert taken == [{"a"}, set()]
