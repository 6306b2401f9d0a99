"""Measurements of a running server, or of one part of it.

against_vllm_bench.py  compares our load generator with vllm bench serve on one server
answers.py             prints a server's answers to a fixed set of requests, for comparison
client.py              measures what our load generator adds, against a server without a model
clocks.py              compares a client's clock with the server's histograms
codec_speed.py         measures how fast KV is encoded and decoded
decision_cost.py       measures what a decision of mode adaptive costs the router
gil_waits.py           measures for how long transfers keep an engine's thread from the interpreter lock
grpc_ceiling.py        measures how fast gRPC moves a hand-off at most
hand_over.py           measures the gap between the first two tokens with and without overlap, alone and under load
idle_cpu.py            measures the CPU time of an idle deployment, by process
modes/                 the map of three modes over limits of TTFT and TPOT, on one fleet
null_server.py         streams tokens at a fixed pace without a model
overload.py            sends more load than a server can take, and checks fairness
planted.py             compares a mode with itself after planting a known difference
power.py               prints how often simulated comparisons find what is there
prefix_routing.py      measures what it brings to know who has the beginning of a prompt
scale.py               measures what router and dispatcher spend on 64 workers and 5,000 streams
served.py              serves an application from a process of its own, for the two that need it
simulated_modes.py     simulates the three modes, to choose the weights of mode adaptive
slow_proxy.py          slows a server's streamed answers down by an exact amount
step_target.py         compares one engine with and without a step target, under Poisson load
unloaded_ttft.py       measures TTFT of both modes without load, in alternation
wire_accuracy.py       measures what quantised KV on the wire does to answers
"""
