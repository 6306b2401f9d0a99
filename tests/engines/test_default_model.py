"""The default model as the package index has it becomes one that loads. Slow, so not among the unit tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.engines
def test_the_converted_default_model_loads_with_its_chat_template(tmp_path: Path):
    code = (
        "from cluster.model_store import prepare_model\n"
        "from transformers import AutoConfig, AutoTokenizer\n"
        "path = prepare_model('smollm2-135m')\n"
        "tokenizer = AutoTokenizer.from_pretrained(path)\n"
        "chat = [{'role': 'user', 'content': 'Hello'}]\n"
        "print(AutoConfig.from_pretrained(path).architectures[0], tokenizer.eos_token, len(tokenizer))\n"
        "print(repr(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)))\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=180, env=environment
    )
    architecture, chat = result.stdout.splitlines()
    assert architecture == "LlamaForCausalLM <|im_end|> 49152"
    assert "<|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\n" in chat
    (path,) = [path for path in (tmp_path / "ridgeline" / "models").iterdir() if path.is_dir()]
    assert (path / "model.safetensors").stat().st_size == pytest.approx(269e6, rel=0.01)
