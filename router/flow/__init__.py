"""Which request is accepted, and whose turn it is. Nothing here knows HTTP or an engine.

admission_rules.py      says whether a request is accepted
admission.py            counts what is accepted, for these rules
held_bodies.py          limits the bytes of bodies in memory
concurrency_limiter.py  takes a few requests at a time, in fair order
fair_queue.py           decides whose prompt is next
rates.py                measures a worker's prompt tokens per second, and amounts that fade
"""
