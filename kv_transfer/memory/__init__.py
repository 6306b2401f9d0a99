"""Where KV blocks lie in memory, and how their bytes are read and written.

blocks.py  a paged KV cache as layers of numbered blocks
host.py    blocks in host memory
device.py  blocks in a GPU's memory
rows.py    copies rows by index: by the kernel, else by torch
row_kernel.py  the kernel, in Triton
shared.py  a cache that other processes can map
ipc.py     a cache on a GPU that other processes can open
glibc.py   keeps freed memory for the next frame
"""
