"""Which variables of the shell of `serve` the processes of other nodes get."""

from cluster.runtime.environment import forwarded_variables


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
