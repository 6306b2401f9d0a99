"""The shipped text as tokens of a tokenizer, and as pieces where there is none."""

import itertools
import statistics

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.trace.prompts import (
    PART,
    SAMPLE_PARTS,
    TEXT_FILE,
    PromptMaker,
    TextWindows,
    load_text_tokens,
    load_tokenizer,
    prompt_text,
    sample_text,
    text_parts,
)
from ridgeline.loadtest.trace.trace import Trace, TraceRow

FIRST_CHARACTERS = 64
"""What blocks of 16 tokens of English have, about."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of bytes and pairs as models have it, saved by transformers with its limit on lengths."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=["<eos>"], initial_alphabet=alphabet)
    words.train([str(TEXT_FILE)], trainer)
    words.enable_truncation(100)
    words.enable_padding(length=100, pad_token="<eos>")
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(folder)
    words.save(str(folder / "tokenizer.json"))
    return folder


def test_tokens_are_those_that_transformers_gives(folder):
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = load_text_tokens(str(folder))
    assert list(ids) == theirs(TEXT_FILE.read_text(), add_special_tokens=False, verbose=False)["input_ids"]
    assert prompt_text(str(folder), list(ids[:500]), 500) == theirs.decode(ids[:500])


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "the folder has no tokenizer.json"), ("{", "EOF while parsing"), ('{"model": 1}', "model")],
    ids=str,
)
def test_a_folder_that_has_no_tokenizer_is_refused_with_the_fix(tmp_path, content, reason):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(LoadTestError) as told:
        load_tokenizer(str(tmp_path))
    for part in (str(tmp_path), reason, "--tokenizer", "--text-prompts"):
        assert part in str(told.value)


@pytest.mark.parametrize("name", ["/no/such/folder", "an organisation/with/too many parts"])
def test_what_is_neither_a_folder_nor_a_name_of_the_hub_is_refused(name):
    with pytest.raises(LoadTestError, match="cannot be loaded"):
        load_tokenizer(name)


def _tokens_per_part(folder) -> float:
    sample = sample_text(SAMPLE_PARTS)
    return len(load_tokenizer(str(folder)).encode(sample).ids) / len(PART.findall(sample))


@pytest.mark.parametrize("tokens", [200, 2000])
def test_pieces_are_on_average_as_many_as_tokens(folder, tokens):
    parts, tokenizer = text_parts(_tokens_per_part(folder)), load_tokenizer(str(folder))
    windows = TextWindows(parts.ids, seed=0)
    texts = [parts.text(windows.window(ordinal, tokens), tokens) for ordinal in range(50)]
    assert statistics.mean(len(tokenizer.encode(text).ids) for text in texts) == pytest.approx(tokens, rel=0.1)


@pytest.mark.parametrize("tokens_per_part", [0.3, 0.97, 1.4, 5.0])
def test_no_two_texts_begin_alike_and_shared_beginnings_are_shared(tokens_per_part):
    blocks = [TraceRow(float(i), 300, 8, prefix_ids=(0, 1) if i % 2 else (0, 2)) for i in range(40)]
    turns = [TraceRow(float(i), 100 * (i + 1), 50, after=(39 + i,) if i else ()) for i in range(3)]
    alone = [TraceRow(float(i), 100, 8) for i in range(200)]
    trace = Trace("made", (*blocks, *turns, *alone), prefix_block_tokens=64)
    parts = text_parts(tokens_per_part)
    maker = PromptMaker(TextWindows(parts.ids, seed=0), trace, warmup_requests=2)
    for round_index in (0, 10_000):
        texts = [parts.text(maker.prompt(index, round_index), 10_000) for index in range(len(trace.rows))]
        shared, conversation = texts[:40], texts[40:43]
        (common,) = {parts.text(maker.prompt(index, round_index), 64) for index in range(40)}
        assert all(text.startswith(common) for text in shared)
        assert all(longer.startswith(text) for text, longer in itertools.pairwise(conversation))
        own = [*conversation[:1], shared[0], *texts[43:]]
        beginnings = {text[:FIRST_CHARACTERS] for text in own}
        assert len(beginnings) == len(own)
