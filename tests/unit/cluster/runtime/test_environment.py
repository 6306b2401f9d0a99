"""Which variables of the shell of `serve` the processes of other nodes get."""

import os
import sys

from ridgeline.cluster.runtime.environment import apart_from_the_shell, forwarded_variables, search_path


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


def test_a_ray_of_our_own_hears_of_no_other_one_and_the_shell_stays_as_it_was(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    before = dict(os.environ)
    with apart_from_the_shell():
        assert "RAY_ADDRESS" not in os.environ
        assert os.environ["PYTHONSAFEPATH"] == "1"
    assert dict(os.environ) == before
