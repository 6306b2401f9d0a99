"""The one configuration of a deployment.

models.py        every setting: type, unit, default, meaning
autoscale.py     those of `autoscale`, and which of them exclude each other
gpu_defaults.py  defaults that differ where a pool has GPUs
loader.py        defaults, YAML file, flags; where each value came from
api_keys.py      keys of clients and operators, as hashes
"""
