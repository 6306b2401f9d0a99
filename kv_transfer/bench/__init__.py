"""`ridgeline bench transfer`.

measure.py         hand-offs beside memcpy, by transport
source_process.py  the process that is fetched from
"""
