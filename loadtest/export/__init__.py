"""Rounds in the formats of other load generators.

vllm_bench.py    a round as the JSON of `vllm bench serve --save-detailed`
saved_export.py  writes the rounds of a finished run in such a format
"""
