"""What one request asks of vLLM, leg by leg.

sampling.py        SamplingParams of the two legs
logprobs.py        vLLM's log-probabilities to and from the wire
asked_logprobs.py  those of chosen token ids, beside others in one step
forced_tokens.py   repeats tokens that a client already has
"""
