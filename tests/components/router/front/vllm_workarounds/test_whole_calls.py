"""A tool call is told if its text is whole, in each API, for each end of the text, whole and streamed alike."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from transformers import AutoTokenizer

from ridgeline.engine.passed_args import front
from tests.support import fake_engine
from tests.support.fake_engine import FakeEngine
from tests.support.served_router import serving

# isort: split
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

from ridgeline.router.front.vllm_workarounds import whole_calls

END = 1
"""The token that the engines end with; vLLM passes it on as one to stop at, since the tokenizer's is another."""
KIMIS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
MARKS = (
    *KIMIS,
    "<|tool_call|>",
    "[TOOL_CALLS]",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
ONE, OTHER = ("look", {"at": "Oslo", "days": 3}), ("go", {"at": "b"})
BOTH = [ONE, OTHER]


def in_json(key: str = "arguments") -> list[str]:
    return [json.dumps({"name": name, key: arguments}) for name, arguments in BOTH]


def in_xml(tool: str, parameter: str) -> str:
    """Both calls, of patterns for a tool's name and parameters, and for a parameter's name and value."""
    return "".join(tool % (name, "".join(parameter % pair for pair in given.items())) for name, given in BOTH)


HERMES = "Let me see. " + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in in_json())
XML = "Let me see. " + in_xml(
    "<tool_call>\n<function=%s>\n%s</function>\n</tool_call>\n", "<parameter=%s>\n%s\n</parameter>\n"
)
KIMI = "<|tool_call_begin|>functions.%s:%d<|tool_call_argument_begin|>%s<|tool_call_end|>"
SAID = {
    "hermes": HERMES,
    "qwen3_coder": XML,
    "glm45": in_xml("<tool_call>%s\n%s</tool_call>", "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n"),
    "minimax_m2": "<minimax:tool_call>\n"
    + in_xml('<invoke name="%s">\n%s</invoke>\n', '<parameter name="%s">%s</parameter>\n')
    + "</minimax:tool_call>",
    "kimi_k2": KIMIS[0]
    + "".join(KIMI % (name, place, json.dumps(given)) for place, (name, given) in enumerate(BOTH))
    + KIMIS[1],
    "granite": f"<|tool_call|>[{','.join(in_json())}]",
    "mistral": f"[TOOL_CALLS][{', '.join(in_json())}]",
    "xlam": f"[{', '.join(in_json())}]",
    "hunyuan_a13b": f"<tool_calls>[{', '.join(in_json())}]</tool_calls>",
    "internlm": f"<|action_start|><|plugin|>{in_json('parameters')[0]}<|action_end|>",
    "pythonic": "[look(at='Oslo', days=3), go(at='b')]",
}
PROPERTIES = {"at": {"type": "string"}, "days": {"type": "integer"}}
FUNCTIONS = [{"name": name, "parameters": {"type": "object", "properties": PROPERTIES}} for name, _ in BOTH]


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """The folder of a model in which each letter is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("letters")
    words = ["<eos>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<end>"])
    tokenizer.add_tokens(list(MARKS))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    size = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": len(words) + len(MARKS)}
    LlamaConfig(architectures=["LlamaForCausalLM"], max_position_embeddings=4096, **size).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, END]}))
    return folder


def prefixes(text: str) -> list[str]:
    return [*(text[:length] for length in range(1, len(text), 4)), text]


@pytest.mark.parametrize("parser", SAID)
def test_a_text_that_stops_anywhere_tells_the_first_of_its_calls_with_all_they_have(parser, letters):
    untouched = SimpleNamespace(parser_cls=None, chat_completion_full_generator=None, parser=None)
    whole_calls.install(
        SimpleNamespace(
            **dict.fromkeys(
                ("openai_serving_chat", "anthropic_serving_messages", "openai_serving_responses"), untouched
            )
        )
    )
    made = whole_calls.telling_whole_calls(ParserManager.get_parser(parser, None, enable_auto_tools=True))
    tokenizer = AutoTokenizer.from_pretrained(letters)
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    told = []
    for text in prefixes(SAID[parser]):
        wish = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], tools=tools)
        _, _, calls = made(tokenizer, wish.tools).parse(text, wish, True, tokenizer(text)["input_ids"])
        told.append([(call.name, json.loads(call.arguments)) for call in calls])
    spoken = BOTH[:1] if parser == "internlm" else BOTH
    assert told[0] == []
    assert told[-1] == spoken
    assert [calls for calls in told if calls != spoken[: len(calls)]] == []


NONE: list[Any] = []
HALF = HERMES.index("slo")
HALF_XML = XML.index("slo")
SECOND, SECOND_XML = HERMES.index("go"), XML.index("go>") + 3
STOPPED = "days"
REVERSED = '<tool_call>\n{"arguments": {"at": "b"}, "name": "go"}\n</tool_call>'
ENDS = {
    "hermes": [
        ("by itself", HERMES, BOTH),
        ("by itself", HERMES[:HALF], NONE),
        ("by itself", HERMES[:SECOND], [ONE]),
        ("by itself", '<tool_call>\n{"name": "look"}\n</tool_call>', NONE),
        ("by itself", REVERSED, [OTHER]),
        ("by a stop string", HERMES, NONE),
        ("by the limit", HERMES[:HALF], NONE),
        ("by the limit", HERMES[:SECOND], [ONE]),
        ("by the limit", "Let me see. <tool_call>", NONE),
        ("by the limit", "Let me", NONE),
    ],
    "qwen3_coder": [
        ("by itself", XML, BOTH),
        ("by itself", XML[:HALF_XML], NONE),
        ("by itself", XML[:SECOND_XML], [ONE]),
        ("by itself", XML[: XML.index("</function>")], NONE),
        ("by itself", "<tool_call>\n<function=now>\n</function>\n</tool_call>", [("now", {})]),
        ("by a stop string", XML, NONE),
        ("by the limit", XML[:HALF_XML], NONE),
        ("by the limit", XML[:SECOND_XML], [ONE]),
    ],
}
CHAT_ENDS = {"by itself": "stop", "by a stop string": "stop", "by the limit": "length"}
MESSAGES_ENDS = {"by itself": "end_turn", "by a stop string": "stop_sequence", "by the limit": "max_tokens"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(request, letters):
    """(HTTP client, what the engines say) of a router with that parser."""
    said: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fake_engine, "next_token", lambda context: [*said, END][min(len(context) - 1, len(said))])
        async with serving(
            letters,
            (FakeEngine("prefill"), FakeEngine("decode")),
            server_args=front({"tool_call_parser": request.param, "chat_template": "{{ 'x' }}"}),
        ) as (http, *_):
            yield http, said


async def asked(http: Any, path: str, wish: dict[str, Any]) -> tuple[Any, list[Any]]:
    """What comes whole, and the events of a stream."""
    whole, stream = [await http.post(path, json={"model": "m", **wish, "stream": stream}) for stream in (False, True)]
    return whole.json(), [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]


async def by_chat(http: Any, how: str, limit: int, choice: str) -> list[Any]:
    """What a whole answer and a stream tell: (calls, end, text)."""
    wish: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": limit}
    wish |= {"tools": [{"type": "function", "function": function} for function in FUNCTIONS], "tool_choice": choice}
    wish |= {"stop": [STOPPED]} if how == "by a stop string" else {}
    answer, told = await asked(http, "/v1/chat/completions", wish)
    (whole,), choices = answer["choices"], [choice for event in told for choice in event["choices"]]
    parts = [part for choice in choices for part in choice["delta"].get("tool_calls") or []]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return [
        ([call["function"] for call in found], end, (content or "").strip())
        for found, end, content in (
            (whole["message"].get("tool_calls") or [], whole["finish_reason"], whole["message"]["content"]),
            (parts, choices[-1]["finish_reason"], text),
        )
    ]


async def by_responses(http: Any, how: str, limit: int, choice: str) -> list[Any]:
    wish: dict[str, Any] = {"input": "x", "max_output_tokens": limit, "store": False}
    wish |= {"tools": [{"type": "function", **function} for function in FUNCTIONS], "tool_choice": choice}
    wish |= {"stop": [STOPPED]} if how == "by a stop string" else {}
    whole, told = await asked(http, "/v1/responses", wish)
    items = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    answers = [(whole["output"], whole["status"]), (items, told[-1]["type"].removeprefix("response."))]
    assert told[-1]["response"]["status"] == whole["status"]
    assert [item["status"] for item in told[-1]["response"]["output"]] == [item["status"] for item in items]
    for output, status in answers:
        if output and output[-1]["type"] == "message":
            assert output[-1]["status"] == status
        assert {item["status"] for item in output[:-1]} | {"completed"} == {"completed"}
    return [
        (
            [item for item in output if item["type"] == "function_call" and item["status"] == "completed"],
            status,
            "".join(part["text"] for item in output for part in item.get("content") or ()).strip(),
        )
        for output, status in answers
    ]


async def by_messages(http: Any, how: str, limit: int, choice: str) -> list[Any]:
    wish: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": limit}
    wish |= {"tools": [{"name": one["name"], "input_schema": one["parameters"]} for one in FUNCTIONS]}
    wish |= {"tool_choice": {"type": "any" if choice == "required" else choice}}
    wish |= {"stop_sequences": [STOPPED]} if how == "by a stop string" else {}
    whole, told = await asked(http, "/v1/messages", wish)
    blocks: dict[int, dict[str, str]] = {}
    for event in told:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = {"name": event["content_block"].get("name", ""), "arguments": "", "text": ""}
        elif event["type"] == "content_block_delta":
            blocks[event["index"]]["arguments"] += event["delta"].get("partial_json") or ""
            blocks[event["index"]]["text"] += event["delta"].get("text") or ""
    (end,) = [event["delta"] for event in told if event["type"] == "message_delta"]
    assert whole.get("stop_sequence") == end["stop_sequence"]
    found = [
        {"name": block["name"], "arguments": json.dumps(block["input"])}
        for block in whole["content"]
        if block["type"] == "tool_use"
    ]
    text = "".join(block.get("text") or "" for block in whole["content"])
    return [
        (found, whole["stop_reason"], text.strip()),
        (
            [block for block in blocks.values() if block["name"]],
            end["stop_reason"],
            "".join(block["text"] for block in blocks.values()).strip(),
        ),
    ]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    ("served", "how", "text", "expected"),
    [(parser, *case) for parser, cases in ENDS.items() for case in cases],
    indirect=["served"],
)
async def test_each_api_tells_the_calls_that_are_whole_and_how_the_text_ended(
    served, letters, how, text, expected, choice
):
    http, said = served
    said[:] = AutoTokenizer.from_pretrained(letters)(text)["input_ids"]
    limit = len(said) if how == "by the limit" else 1000
    ended = CHAT_ENDS[how], "incomplete" if how == "by the limit" else "completed", MESSAGES_ENDS[how]
    if expected and how != "by the limit":
        ended = "tool_calls", "completed", "tool_use"
    for ask, end in zip((by_chat, by_responses, by_messages), ended, strict=True):
        whole, streamed = await ask(http, how, limit, choice)
        for calls, told_end, _ in (whole, streamed):
            assert ([(call["name"], json.loads(call["arguments"])) for call in calls], told_end) == (expected, end), ask
        assert whole[2] == streamed[2]
        assert "<tool_call>" not in whole[2] or (choice == "auto" and not expected)
