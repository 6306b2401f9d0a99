"""The `ridgeline` command, and what it starts: everything that knows Ray or this machine.

cli.py             the commands and their options
commands/          one module per command
config/            the one configuration: settings, files, keys
deployments/       which deployments run on this machine, and those without a terminal
doctor/            whether this machine can run this configuration
runtime/           what runs on Ray: actors, their start, their supervision
model_store.py     puts the model on disk
node_address.py    the address by which this node is reached in a network
node_cores.py      which cores of a node belong to workers
node_gpus.py       the GPUs of a node, as the driver describes them
node_hardware.py   the peaks of a node: measured on a CPU, looked up for a GPU
socket_folders.py  temporary folders in which sockets fit
"""

from importlib.util import find_spec
from pathlib import Path

_OURS = (
    *("contracts", "decode_worker", "engine", "kv_transfer", "loadtest", "prefill_worker", "roofline", "router"),
    "worker_runtime",
)


def _require_our_own() -> None:
    """Raise ImportError, which names the fix, if a module of somebody else stands before a package of Ridgeline.

    Without this the error would be about a name that is missing in it, in a traceback through our modules.
    """
    here = Path(__file__).parents[1]
    for name in _OURS:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            continue
        if (found := Path(spec.origin)) != here / name / "__init__.py":
            raise ImportError(
                f"{found} stands before Ridgeline's own package {name}, which is in {here}: take its folder out of "
                "PYTHONPATH, or give it another name"
            )


_require_our_own()
