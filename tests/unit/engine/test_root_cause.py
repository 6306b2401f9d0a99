"""Why an engine could not load, in one sentence that never points at a log nobody sees."""

import pydantic
import pytest

from ridgeline.engine.root_cause import MOST_CHARACTERS, CauseFile, how_ended, sentence_of

FRONT_END = "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': %d}"


class Shape(pydantic.BaseModel):
    length: int

    @pydantic.model_validator(mode="after")
    def positive(self):
        if self.length < 1:
            raise ValueError(
                "User-specified max_model_len (9000) is greater than the derived one (2048).\n Set another."
            )
        return self


def raised(error, cause=None):
    try:
        raise error from cause
    except type(error) as caught:
        return caught


def test_the_process_that_failed_first_is_believed_and_not_what_its_front_end_says(tmp_path):
    cause = CauseFile(str(tmp_path), "worker-1-1")
    CauseFile(str(tmp_path), "worker-1-1").leave(MemoryError("you tried to allocate\n 40 GiB."))
    CauseFile(str(tmp_path), "worker-1-1").leave(RuntimeError("Worker failed, see stack trace for root cause"))
    assert cause.why_not_loaded(RuntimeError(FRONT_END % 1)) == "MemoryError: you tried to allocate 40 GiB"
    cause.remove()
    assert list(tmp_path.iterdir()) == []


def test_one_that_left_no_word_is_told_by_its_signal(tmp_path):
    why = CauseFile(str(tmp_path), "w").why_not_loaded(RuntimeError(FRONT_END % -9))
    assert (
        why == "its process was ended by SIGKILL (as the kernel does when memory is short: see dmesg) while it loaded"
    )


@pytest.mark.parametrize(
    ("code", "words"), [(3, "ended with status 3"), (-11, "was ended by SIGSEGV"), (-4, "SIGILL (an instruction that")]
)
def test_an_exit_code_is_told_in_words(code, words):
    assert words in how_ended(code)


def test_an_engine_that_ended_while_it_served_tells_status_and_reason(tmp_path):
    cause = CauseFile(str(tmp_path), "w")
    assert cause.why_ended(-11) == "its engine process was ended by SIGSEGV"
    cause.leave(ValueError("no such block"))
    assert cause.why_ended(1) == "its engine process ended with status 1: ValueError: no such block"
    assert cause.why_ended(None) == "its engine process reported a fatal error: ValueError: no such block"


def test_an_error_that_points_at_a_log_gives_way_to_its_cause():
    hidden = raised(KeyError("model.layers.0.mlp"))
    shown = raised(RuntimeError("WorkerProc initialization failed. See stack trace for root cause."), hidden)
    assert sentence_of(shown) == "KeyError: 'model.layers.0.mlp'"
    assert sentence_of(raised(RuntimeError("see the root cause above"))).startswith("RuntimeError: see"), (
        "there is no other"
    )


def test_what_pydantic_adds_is_left_out_and_a_long_text_is_cut():
    with pytest.raises(pydantic.ValidationError) as refused:
        Shape(length=0)
    assert sentence_of(refused.value) == (
        "ValidationError: User-specified max_model_len (9000) is greater than the derived one (2048). Set another"
    )
    assert len(sentence_of(ValueError("word " * 1000))) < MOST_CHARACTERS + 30
