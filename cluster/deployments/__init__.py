"""The deployments of this machine: their names, and those that go on without a terminal.

names.py       which `ridgeline serve` processes run, by name, and what they are doing
background.py  `ridgeline serve --detach`, `status`, `stop` and `logs`
"""
