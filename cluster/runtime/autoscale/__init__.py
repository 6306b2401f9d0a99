"""Turns what is in use of each pool into operations for more workers or fewer: `autoscale` in the configuration.

policy.py  how much of each pool is in use, and what to change: thresholds, for how long, bounds, cooldown
loop.py    reads the routers now and then, says what was decided, and begins the operation
"""
