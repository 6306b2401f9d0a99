"""The one configuration of a deployment.

models.py     every setting: type, unit, default, meaning
autoscale.py  those of `autoscale`
loader.py     defaults, those of GPUs, YAML file, flags; where each value came from
api_keys.py   keys of clients and operators, as hashes
"""
