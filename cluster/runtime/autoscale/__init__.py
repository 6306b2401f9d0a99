"""Has pools follow their load: `autoscale` in the configuration. `ridgeline.router.scheduler.sizing` decides.

loop.py  asks how many workers would keep the SLOs, says it, and begins the operation
"""
