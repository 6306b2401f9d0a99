"""When a prompt starts, and on which workers. Nothing here knows HTTP or an engine.

places.py            asks for an attempt's place, and tells what happens there
placement_events.py  what is told, and what is answered
cluster_state.py     gives prompts their places: the state that events change
pool_queue.py        the prompts that wait for the workers of a pool
choice.py            which workers the next prompt gets, and whether it fetches a beginning that another one has
holds.py             what a placed request counts as on its workers, and each client's places in decode batches
learned.py           how long answers become, how fast KV moves, which worker has which prefixes
"""
