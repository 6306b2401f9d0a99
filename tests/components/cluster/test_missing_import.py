"""A model whose processor needs what is not installed here is refused before anything starts, by the name of it."""

import json
import os
from importlib.util import find_spec

import pytest

from ridgeline.cluster.config.loader import load_config
from ridgeline.cluster.doctor.architectures import missing_import
from ridgeline.cluster.doctor.checks import checks, failures

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchvision") is not None, reason="nothing is missing where torchvision is installed")
def test_a_model_with_images_is_refused_without_torchvision(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "architectures": [ARCHITECTURE]}))
    kinds = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(kinds))
    config = load_config(None, {"model.path": str(tmp_path), "server.port": "0"}).config
    assert any(
        sentence.startswith(f"{tmp_path} cannot be loaded here: ") and "requires the Torchvision library" in sentence
        for sentence in failures(checks(config))
    )


def test_a_model_of_text_alone_costs_no_process(tmp_path):
    assert missing_import(str(tmp_path / "nothing is there"), ("LlamaForCausalLM",)) == ""


@pytest.fixture
def standard_input():
    """A pipe as this process's standard input, in which a user has typed "y"."""
    saved, (read, write) = os.dup(0), os.pipe()
    os.write(write, b"y\n")
    os.close(write)
    os.dup2(read, 0)
    os.close(read)
    yield 0
    os.dup2(saved, 0)
    os.close(saved)


@pytest.mark.slow
def test_a_models_own_code_is_not_run_and_nobody_is_asked_to_allow_it(tmp_path, standard_input):
    ran = tmp_path / "ran"
    config = {"model_type": "made_up", "architectures": ["InternVLChatModel"], "auto_map": {"AutoConfig": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: pass\n")
    assert missing_import(str(tmp_path), ("InternVLChatModel",)) == ""
    assert not ran.exists()
    assert os.read(standard_input, 2) == b"y\n"


LOADS = 'print("\\nImportError: fast_path is not there. It is slower.", file=sys.stderr)'


@pytest.mark.parametrize(
    ("then", "why"),
    [
        ("pass", ""),
        ('raise ValueError("a file is cut short")', ""),
        ('raise ModuleNotFoundError("no sound_library\\nhere. Install it.")', "no sound_library here"),
    ],
)
def test_an_import_error_refuses_a_model_only_if_it_ended_the_loading(tmp_path, monkeypatch, then, why):
    body = f"import sys\nclass AutoProcessor:\n    def from_pretrained(*a, **k):\n        {LOADS}\n        {then}\n"
    (tmp_path / "transformers.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert missing_import(str(tmp_path), (ARCHITECTURE,)) == why
