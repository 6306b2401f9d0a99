"""Which request may start, and when. Nothing here knows HTTP or an engine.

admission.py     decides which requests are accepted
held_bodies.py   limits the bytes of bodies in memory
intake.py        takes a few requests at a time, in fair order
fair_queue.py    decides whose prompt is next
prompt_queue.py  gives prompts places on workers
decode_slots.py  limits each client's places in decode batches
rates.py         measures a worker's prompt tokens per second
"""
