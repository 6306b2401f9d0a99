"""What vLLM does otherwise than we need; `README.md` says what, why, and how to see that it can go.

seeded_chunks.py     seeds with prompts of several steps on CPU
queue_names.py       shared memory that outlives a killed engine
orphan_watch.py      ends a child whose parent is gone
cores.py             which cores a CPU engine computes on
worker_extension.py  puts the others into vLLM's worker, and asks its connector
"""
