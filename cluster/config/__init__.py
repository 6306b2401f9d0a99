"""The one configuration of a deployment.

models.py    every setting: type, unit, default, meaning
loader.py    defaults, YAML file, flags; where each value came from
grid.py      candidates of `compare --grid`, each the configuration with some settings changed
api_keys.py  keys of clients and operators, as hashes
"""
