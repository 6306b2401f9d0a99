"""Roofline arithmetic: what a transformer step must compute and move, and how fast a device can do both.

Pure functions; no engine, no network. Start with `cost` (one step), then `analysis` (what follows).

cost.py           FLOPs and bytes of a step
analysis.py       lower bounds on time, batch sizes, the rows of `ridgeline roofline`
bottleneck.py     which resource of a deployment is short, in one sentence
hardware.py       peaks of known devices
calibration.py    measures the peaks of this host
process_cores.py  the cores that this process may use
model_shape.py    the sizes of a model
hf_config.py      reads those sizes from a config.json
known_models.py   well-known models, for use without a config.json
quantisation.py   bytes of a stored weight
render.py         prints the rows
errors.py         errors that name the value at fault
"""
