"""The processor that a model of texts does not have: vLLM's own code looks for its chat template, or need not."""

import json
from types import SimpleNamespace

import pytest
import vllm.renderers.hf
from vllm.renderers.hf import resolve_chat_template

from ridgeline.router.front.vllm_workarounds.no_processor import note_that_there_is_no_processor

OF_THE_TOKENIZER = "{{ messages[0].content }}"


@pytest.fixture
def asked(monkeypatch):
    """Collect the models whose processor vLLM asks transformers for."""
    names = []

    def get_processor(name, **kwargs):
        names.append(name)
        raise OSError("there is none")

    monkeypatch.setattr(vllm.renderers.hf, "cached_get_processor", get_processor)
    monkeypatch.setattr(vllm.renderers.hf, "_PROCESSOR_CHAT_TEMPLATES", {})
    return names


@pytest.fixture
def tokenizer(tmp_path):
    return SimpleNamespace(
        name_or_path=str(tmp_path), get_chat_template=lambda template, tools: template or OF_THE_TOKENIZER
    )


def model_config(path, **changes):
    known = {
        "model": str(path),
        "tokenizer": str(path),
        "tokenizer_revision": None,
        "code_revision": "v1",
        "trust_remote_code": False,
        "is_multimodal_model": False,
    }
    return SimpleNamespace(**(known | changes))


@pytest.mark.parametrize("changes", [{}, {"model": "elsewhere", "tokenizer_revision": "v2", "trust_remote_code": True}])
def test_a_model_of_texts_gets_its_tokenizers_template_and_no_processor_is_looked_for(
    changes, tmp_path, tokenizer, asked
):
    config = model_config(tmp_path, **changes)
    note_that_there_is_no_processor(tokenizer, config)
    assert resolve_chat_template(tokenizer, None, None, model_config=config) == OF_THE_TOKENIZER
    assert asked == []


def test_without_the_note_vllm_looks_for_one(tmp_path, tokenizer, asked):
    resolve_chat_template(tokenizer, None, None, model_config=model_config(tmp_path))
    assert asked == [str(tmp_path)]


def test_a_model_of_images_too_is_asked_for_its_processor(tmp_path, tokenizer, asked):
    config = model_config(tmp_path, is_multimodal_model=True)
    note_that_there_is_no_processor(tokenizer, config)
    resolve_chat_template(tokenizer, None, None, model_config=config)
    assert asked == [str(tmp_path)]


def test_a_model_whose_files_name_a_processor_is_asked_for_it(tmp_path, tokenizer, asked):
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "SomeProcessor"}))
    config = model_config(tmp_path)
    note_that_there_is_no_processor(tokenizer, config)
    resolve_chat_template(tokenizer, None, None, model_config=config)
    assert asked == [str(tmp_path)]
