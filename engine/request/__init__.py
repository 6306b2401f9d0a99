"""A request's parameters for vLLM, leg by leg.

sampling.py        the SamplingParams of the two legs
logprobs.py        log-probabilities between vLLM and the wire
forced_tokens.py   makes an engine repeat tokens that a client already has
"""
