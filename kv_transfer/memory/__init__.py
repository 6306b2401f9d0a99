"""Where KV blocks lie, and how their bytes are reached.

blocks.py  a paged KV cache as layers of numbered blocks
host.py    blocks in host memory
device.py  blocks in a GPU's memory
shared.py  a cache that other processes can map
glibc.py   keeps memory that frames pass through
"""
