"""Rounds in the format of another load generator.

vllm_bench.py    a round as the JSON of `vllm bench serve --save-detailed`
saved_export.py  writes the rounds of a finished run so
"""
