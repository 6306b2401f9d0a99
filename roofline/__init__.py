"""Roofline arithmetic: what a transformer step must compute and move, and what a device can do of each.

Pure functions over model sizes; no engine, no network. Start at `cost` (one step), then `analysis` (what follows).

cost.py          FLOPs and bytes of a step
analysis.py      floors, batches, transfer, balance
hardware.py      peaks of known devices
calibration.py   measures this host's
model_shape.py   the sizes of a model
hf_config.py     read from its config.json
known_models.py  without its config.json
quantisation.py  bytes of a stored weight
table.py         the rows of `ridgeline roofline`
render.py        shows them
errors.py        names the value at fault
"""
