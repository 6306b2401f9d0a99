"""Turns what is in use of each pool into operations for more workers or fewer: `autoscale` in the configuration.

use.py     how much of each pool is in use, between two readings of the routers
policy.py  what to change: thresholds, how long they must be passed, bounds, cooldown
loop.py    reads the routers now and then, says what was decided, and begins the operation
"""
