"""What the files of a LoRA adapter say, and the copies that engines load: the same whatever becomes of the files."""

import multiprocessing
import os
import shutil
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ridgeline.contracts.errors import AdapterRefused
from ridgeline.engine.adapter_files import CONFIG, WEIGHTS, AdapterCopies, digest_of, require_fit
from tests.support.adapter_files import OUT, Q, write_adapter

MODEL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
V = Q.replace("q_proj", "v_proj").format(0) + ".lora_B.weight"


@pytest.mark.parametrize(
    ("shapes", "config", "named"),
    [
        ({}, {"r": 32}, ("max_lora_rank", "32")),
        ({}, {"rank_pattern": {"q_proj": 24}}, ("max_lora_rank", "32")),
        ({}, {"r": 1024}, ("1024", "512")),
        ({}, {"r": None}, ("save_pretrained",)),
        ({}, {"peft_type": "IA3"}, ("IA3",)),
        ({f"{Q.format(2)}.lora_A.weight": [8, 64]}, {"base_model_name_or_path": "org/big"}, ("org/big", "2 layers")),
        ({f"{Q.format(0)}.lora_A.weight": [8, 128]}, {}, ("128", "64")),
        ({f"{OUT.format(0)}.lora_B.weight": [32, 8]}, {}, ("32", "64")),
        ({V: [16, 8]}, {}, ("v_proj", "16", "32")),
    ],
)
def test_an_adapter_that_an_engine_cannot_serve_is_refused_with_what_to_change(tmp_path, shapes, config, named):
    folder = write_adapter(tmp_path / "a", shapes, **config)
    with pytest.raises(AdapterRefused) as refused:
        require_fit(folder, 16, MODEL)
    assert all(word in str(refused.value) for word in (*named, str(folder)))


def test_an_adapter_that_fits_is_not_refused(tmp_path):
    inside = {f"{Q.format(7)}.lora_A.weight".replace("layers", "vision_tower.layers"): [8, 99]}
    require_fit(write_adapter(tmp_path / "a", inside), 8, {"text_config": MODEL})
    require_fit(write_adapter(tmp_path / "c", {V: [32, 8]}), 8, MODEL)
    require_fit(write_adapter(tmp_path / "d", {V: [16, 8]}), 8, {**MODEL, "num_global_key_value_heads": 1})
    require_fit(write_adapter(tmp_path / "b", {f"{Q.format(9)}.lora_A.weight": [8, 9]}), 8, {})


@pytest.mark.parametrize("broken", ["folder", CONFIG, WEIGHTS[0], "no json", "a list", "no tensors"])
def test_files_that_are_missing_or_broken_are_named(tmp_path, broken):
    folder = write_adapter(tmp_path / "a")
    {
        "folder": lambda: shutil.rmtree(folder),
        CONFIG: (folder / CONFIG).unlink,
        WEIGHTS[0]: (folder / WEIGHTS[0]).unlink,
        "no json": lambda: (folder / CONFIG).write_text("{"),
        "a list": lambda: (folder / CONFIG).write_text("[]"),
        "no tensors": lambda: (folder / WEIGHTS[0]).write_bytes(b"PK"),
    }[broken]()
    with pytest.raises(AdapterRefused, match=str(folder)):
        require_fit(folder, 16, MODEL)


def test_a_digest_stands_for_the_content_of_weights_and_configuration(tmp_path):
    first, copy = write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b")
    (copy / "README.md").write_text("beside it")
    assert digest_of(first) == digest_of(copy)
    others = [write_adapter(tmp_path / "c", weights=b"1"), write_adapter(tmp_path / "d", lora_alpha=32)]
    assert len({digest_of(one) for one in (first, *others)}) == 3


@pytest.fixture
def a_process(tmp_path):
    """Make what one process has, in the folder of all."""
    with ExitStack() as ending:
        yield lambda: ending.enter_context(closing(AdapterCopies(tmp_path / "kept")))


def test_a_copy_stays_as_it_was_when_the_files_change_and_goes_with_its_last_user(tmp_path, a_process):
    source, one, other = write_adapter(tmp_path / "a"), a_process(), a_process()
    digest = one.keep(source)
    assert other.keep(source, digest) == digest
    write_adapter(source, weights=b"new")
    assert digest_of(one.folder(digest)) == digest, "an engine that reads it again gets what it had"
    changed = one.keep(source)
    assert changed == digest_of(source) != digest
    one.drop(digest)
    assert one.folder(digest).is_dir(), "another process uses it"
    shutil.rmtree(source)
    assert a_process().keep(source, changed) == changed, "a worker that comes later needs no source"
    other.close()
    assert not one.folder(digest).exists()
    assert one.folder(changed).exists()


def test_a_worker_that_finds_other_files_than_the_others_is_refused(tmp_path, a_process):
    source, copies = write_adapter(tmp_path / "a"), a_process()
    digest = digest_of(source)
    write_adapter(source, weights=b"new")
    with pytest.raises(AdapterRefused, match="load_inplace"):
        copies.keep(source, digest)


def _keep_and_die(root: Path, source: Path) -> None:
    AdapterCopies(root).keep(source)
    os._exit(1)


def test_the_copy_of_a_process_that_was_killed_is_removed_with_the_next_one(tmp_path, a_process):
    root, source = tmp_path / "kept", write_adapter(tmp_path / "a")
    dead = multiprocessing.get_context("fork").Process(target=_keep_and_die, args=(root, source))
    dead.start()
    dead.join(30)
    left = a_process()
    assert left.folder(digest_of(source)).is_dir()
    other = left.keep(write_adapter(tmp_path / "b", weights=b"1"))
    left.drop(other)
    assert [path.name for path in root.iterdir()] == [".lock"]


def test_a_link_that_another_user_has_left_is_not_the_folder_of_copies(tmp_path):
    precious = tmp_path / "home" / "papers"
    precious.mkdir(parents=True)
    (tmp_path / "kept").symlink_to(tmp_path / "home")
    copies = AdapterCopies(tmp_path / "kept")
    with pytest.raises(AdapterRefused, match="TMPDIR"):
        copies.keep(write_adapter(tmp_path / "a"))
    assert precious.is_dir()


def test_a_copy_that_is_not_used_may_be_dropped_again(tmp_path, a_process):
    copies = a_process()
    digest = copies.keep(write_adapter(tmp_path / "a"))
    copies.drop(digest)
    copies.drop(digest)
    assert not copies.folder(digest).exists()
