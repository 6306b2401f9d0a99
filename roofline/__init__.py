"""Roofline arithmetic: what a transformer step must compute and move, and what a device can do of each.

Pure functions over model sizes; no engine, no network. Start at `cost` (one step), then `analysis` (what follows
from it). The engine, the router, the planner, the report and `ridgeline roofline` call it.
"""
