"""Measurements of a running server, or of one part.

answers.py        what a server answers to a fixed set of requests, to be compared
clocks.py         a client's clock against the server's histograms
codec_speed.py    how fast KV is encoded and decoded
idle_cpu.py       CPU time of a deployment that has nothing to do, by process
overload.py       more load than a server can take, and fairness between clients
unloaded_ttft.py  TTFT of both modes without load, in alternation
wire_accuracy.py  what quantised KV on the wire does to answers
"""
