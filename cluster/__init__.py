"""The `ridgeline` command, and what it starts: everything that knows Ray or this machine.

cli.py             the commands and their options
commands/          one module per command
config/            the one configuration: settings, files, keys
deployments/       which deployments run on this machine, and those without a terminal
doctor/            whether this machine can run this configuration
runtime/           what runs on Ray: actors, their start, their supervision
folders.py         a user's, and temporary ones in which sockets fit
errors.py          why a deployment does not start or go on
model_store.py     puts the model on disk
node_launches.py   which nodes Ray's autoscaler is launching, and why others failed
node_address.py    the address by which this node is reached in a network
node_cores.py      which cores of a node belong to workers
node_gpus.py       the GPUs of a node, as the driver describes them, and the peaks of its devices
"""
