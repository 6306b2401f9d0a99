"""Which request may start, and when. Nothing here knows HTTP or an engine.

admission_rules.py      says whether a request is accepted
admission.py            counts what is accepted, for these rules
held_bodies.py          limits the bytes of bodies in memory
concurrency_limiter.py  takes a few requests at a time, in fair order
fair_queue.py           decides whose prompt is next
client_prompts.py       decides which of a client's prompts is next
placement.py            which workers an attempt gets, and what counts there until it ends
prompt_queue.py         gives prompts places on workers
choice.py               which workers the next prompt gets
learned.py              how long answers become, and how fast KV moves
decode_slots.py         limits each client's places in decode batches
rates.py                measures a worker's prompt tokens per second, and amounts that fade
"""
