"""The decode engine's end: pair with a source, pull its blocks, and keep its lease alive meanwhile.

fetcher.py      fetches hand-offs by any transport, each rank its part, and renews their leases
grpc_puller.py  the `grpc` transport
ipc_puller.py   the `cuda-ipc` transport
pinned.py       what pulls that read the source's memory themselves have in common, and the `shm` transport
stream.py       one server stream, read on a thread
threads.py      the threads on which pulls run
results.py      passes results from threads to the step loop
"""
