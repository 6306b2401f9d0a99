"""Workarounds for vLLM; `README.md` says what each one is for and how to see that it can go.

model_runner.py      makes seeds work with prompts of several steps on CPU, and log-probabilities of chosen ids
rows_without_adapter.py  keeps LoRA adapters to the rows of their own sequences, on CPUs
gloo_device.py       keeps the process groups of a lone rank from waking a thread each
forked.py            has engine processes forked and not started afresh
core_loop.py         sends statistics before a step, waits for news where vLLM sleeps, and changes the steps' limits
engine_process.py    what each process of an engine does first, what ends it, and what it leaves behind
bounded_grammars.py  bounds the work that a grammar is for an engine
cores.py             decides which cores a CPU engine computes on
"""
