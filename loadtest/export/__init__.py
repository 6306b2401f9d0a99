"""Rounds in the formats of other load generators.

round_head.py       what an exported round says of its run
vllm_bench.py       a round as the JSON of `vllm bench serve --save-detailed`
guidellm_report.py  all rounds of a variant as GuideLLM's benchmarks.json, written by GuideLLM's own classes
saved_export.py     writes the rounds of a finished run in such a format
"""
