"""Programs for the people who work on Ridgeline; the product imports none of them.

bench/         measurements beside those of `ridgeline bench`
chaos/         faults under load: is anything lost, does anything stay behind
differential/  random requests to Ridgeline and to plain vLLM
fuzz/          malformed requests, messages and frames
"""
