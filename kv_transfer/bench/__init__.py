"""The measurement behind `ridgeline bench transfer`.

measure.py         measures hand-offs by transport, with memcpy as the baseline
source_process.py  runs the process that the hand-offs are fetched from
"""
