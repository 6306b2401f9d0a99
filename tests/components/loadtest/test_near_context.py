"""Prompts near the model's context, sent as text to vLLM's app: the chat template counts, and so do turns before.

The tokenizer is a BPE, whose texts may have other tokens than those that they were made of.
"""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ridgeline.loadtest.plan import ReplayPlan
from ridgeline.loadtest.run.replay import run_replay
from ridgeline.loadtest.run.unloaded import measure_unloaded
from ridgeline.loadtest.trace.prompts import TEXT_FILE
from tests.support.talking_router import TEMPLATE, WORDS, make_model, talking_router

CONTEXT = 4096
ROWS = [(4080, 16), (4060, 16), (16, 16), (1, 16), (4094, 2), (1, 4095)]
"""The last one fits only without a template."""
BLOCKS_OF_16 = {"hash_ids": [*range(200)]}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The files of a model with a chat template and a tokenizer of bytes and pairs."""
    folder = tmp_path_factory.mktemp("bpe")
    make_model(folder)
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<eos>", "<bos>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train(
        [str(TEXT_FILE)], trainers.BpeTrainer(vocab_size=WORDS, special_tokens=special, initial_alphabet=alphabet)
    )
    words.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", bos_token="<bos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def _turns(scale: int) -> list[dict]:
    """Return requests of these lengths, and a session that grows to the context by its own answer."""
    lines = [{"input_length": scale * asked, "output_length": scale * answer} for asked, answer in ROWS]
    lines = [line | {"timestamp": 20 * number} for number, line in enumerate(lines)]
    turns = [(2000, 40, {"timestamp": 200}), (2040, 16, BLOCKS_OF_16)]
    return lines + [
        {"session_id": "a", "input_length": scale * asked, "output_length": scale * answer} | fields
        for asked, answer, fields in turns
    ]


@pytest.mark.parametrize(
    ("fields", "scale", "least"),
    [
        ({"endpoint": "chat"}, 1, 12),
        ({"endpoint": "chat", "length_scale": 0.5}, 2, 12),
        ({"text_prompts": True}, 1, 4),
        ({}, 1, 1),
    ],
    ids=str,
)
async def test_no_request_is_longer_than_the_model_can_hold_whatever_the_server_adds(
    model, tmp_path, fields, scale, least
):
    trace, console = tmp_path / "near.jsonl", Console(file=io.StringIO())
    trace.write_text("\n".join(map(json.dumps, _turns(scale))))
    plan = ReplayPlan(trace=str(trace), settle_s=0.01, **fields)
    async with talking_router(model) as (http, *_):
        result = await run_replay(str(http.base_url), plan, console)
        unloaded = await measure_unloaded(str(http.base_url), plan, console, round_index=1)
    wanted = [4080, 4060, 16, least, 4094, *([1] if least == 1 else []), 2000, 4080]
    assert [record.error for record in result.records] == [None] * len(wanted)
    for record, row, tokens in zip(result.records, result.trace.rows, wanted, strict=True):
        assert row.input_tokens == tokens
        assert tokens - 10 <= record.input_tokens <= tokens
    assert unloaded.input_tokens[-1] <= CONTEXT - unloaded.output_tokens
    notes = " ".join(result.trace.notes)
    assert ("1 of 8 requests dropped" in notes) == ("prompts lengthened" in notes) == (least > 1)
