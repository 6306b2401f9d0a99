"""A model whose processor needs what is not installed here is refused before anything starts, by the name of it."""

import json
from importlib.util import find_spec

import pytest

from cluster.config.loader import load_config
from cluster.doctor.architectures import missing_import
from cluster.doctor.checks import checks, failures

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"


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
