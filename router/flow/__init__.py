"""Who may start, and when: nothing here knows HTTP or an engine.

admission.py     what is taken in
held_bodies.py   how much of bodies is kept
intake.py        a few requests at a time, in fair order
fair_queue.py    whose prompt is next
prompt_queue.py  places for prompts on workers
decode_slots.py  places in the batches of decode
rates.py         prompt tokens a second of a worker
"""
