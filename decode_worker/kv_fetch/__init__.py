"""The decode engine's end: pair with a source, pull its blocks, and keep its lease alive meanwhile.

fetcher.py      fetches hand-offs by any transport
grpc_puller.py  the `grpc` transport
shm_puller.py   the `shm` transport
ipc_puller.py   the `cuda-ipc` transport
pinned.py       what pulls that read the source's memory themselves have in common
stream.py       one server stream, read on a thread
threads.py      the threads on which pulls run
heartbeat.py    renews leases
ranks.py        which source bytes make up this rank's blocks
results.py      passes results from threads to the step loop
"""
