"""Which variables of the shell of `serve` the processes of other nodes get."""

import os
import sys

import pytest

from ridgeline.cluster.runtime.environment import apart_from_the_shell, forwarded_variables, ray_variables, search_path


def test_variables_of_downloads_and_network_libraries_are_forwarded_and_no_others():
    shell = {
        "HF_TOKEN": "t",
        "HF_ENDPOINT": "https://mirror",
        "HUGGING_FACE_HUB_TOKEN": "t",
        "NCCL_SOCKET_IFNAME": "eth1",
        "UCX_NET_DEVICES": "mlx5_0:1",
        "GLOO_SOCKET_IFNAME": "eth1",
    }
    others = {"PATH": "/bin", "VLLM_API_KEY": "k", "RIDGELINE_API_KEY": "k", "NCCLX": "1", "AWS_SECRET_ACCESS_KEY": "s"}
    assert forwarded_variables(shell | others) == shell


def test_a_working_folder_that_nobody_named_is_not_searched_for_modules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), "/a/library"])
    monkeypatch.setenv("PYTHONPATH", ":/a/library")
    assert search_path() == "/a/library"
    monkeypatch.setenv("PYTHONPATH", ".")
    assert search_path().split(":") == [str(tmp_path), "/a/library"]


@pytest.mark.parametrize("name", ["RAY_ADDRESS", "RAY_RUNTIME_ENV_HOOK", "RAY_AUTH_MODE", "RAY_any_of_its_settings"])
def test_a_ray_of_our_own_hears_nothing_of_the_shells_and_the_shell_stays_as_it_was(name, monkeypatch):
    monkeypatch.setenv(name, "elsewhere")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the shell's")
    monkeypatch.setenv("RAY_TMPDIR", "/a/folder")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    before = dict(os.environ)
    assert name in ray_variables()
    with apart_from_the_shell():
        assert name not in os.environ
        assert len(os.environ["RAY_AUTH_TOKEN"]) >= 32, "its own"
        assert (os.environ["PYTHONSAFEPATH"], os.environ["RAY_TMPDIR"]) == ("1", "/a/folder")
        os.environ["RAY_SET_BY_RAY"] = "1"
    assert dict(os.environ) == before
