"""Measurements of a running server, or of one part of it.

decision_cost.py      measures what a decision of mode adaptive costs the router
modes.py              measures the modes of a running server with the client of `vllm bench serve`
regret.py             simulates what mode adaptive and `plan` lose to the best mode
regret_on_engines.py  measures what they lose by the rounds of modes.py
"""
