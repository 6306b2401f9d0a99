"""The table "Coming from `vllm serve`" in docs/how-to/serve.md: every setting loads, and every refusal is one."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from ridgeline.cluster.config.loader import load_config
from ridgeline.engine import passed_args

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "serve.md"
SECTION = re.compile(r"^## Coming from `vllm serve`\n(.*?)^## ", re.DOTALL | re.MULTILINE)
ROW = re.compile(r"^\| (`--.*?) \| (.*?) \| (.*?) ?\|$", re.MULTILINE)
SETTING = re.compile(r"`([\w.*]+)=([^`]+)`")
POOLS = ("prefill", "decode", "colocated")
ON_GPUS = {f"pools.{pool}.gpus_per_worker": "1" for pool in POOLS}
NOT_VLLMS = ("gpus_per_worker", "cores_per_worker")


def rows() -> list[tuple[list[str], str, str]]:
    section = SECTION.search(PAGE.read_text())
    assert section is not None
    return [(re.findall(r"--([a-z-]+)", flags), here, remarks) for flags, here, remarks in ROW.findall(section[1])]


def settings(cell: str) -> dict[str, str]:
    return {
        name.replace("*", pool): value
        for name, value in SETTING.findall(cell)
        for pool in (POOLS if "*" in name else ("",))
    }


@pytest.mark.parametrize(
    ("flags", "here", "remarks"), rows(), ids=lambda cell: "-".join(cell) if isinstance(cell, list) else ""
)
def test_a_flag_of_vllms_is_the_setting_that_the_table_names(flags, here, remarks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("chat.jinja").write_text("{{ messages }}")
    load_config(None, {**ON_GPUS, **settings(here), **settings(remarks)}, both_modes=True)
    names = [flag.replace("-", "_") for flag in flags]
    if here == "refused":
        assert all(map(passed_args.why_refused, names))
        return
    ours = [passed_args.OUR_SETTINGS.get(name, f"*_args.{name}") for name in names]
    for setting in settings(here):
        assert any(fnmatchcase(setting, pattern) for pattern in ours), f"{setting} is not {flags}"
