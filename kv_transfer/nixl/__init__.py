"""The `nixl` transport, experimental: one-sided reads by NVIDIA's NIXL over UCX, into staging memory and from there on.

UCX has run in host memory, by TCP and between processes of one host; not over InfiniBand, and not on GPUs. `auto` never
picks it, and nothing of NIXL is loaded unless it is configured.

library.py  finds and loads NIXL, which is optional
agent.py    a NIXL agent, as both ends use it
source.py   the end that is read from: what it tells its readers, and where blocks lie
staging.py  where reads land
puller.py   the end that reads
"""
