"""The decode engine's end: pair with a source, pull its blocks, keep its lease alive meanwhile.

fetcher.py      pulls hand-offs, whatever the transport
grpc_puller.py  the `grpc` transport
shm_puller.py   the `shm` transport
control.py      questions and answers over gRPC
stream.py       one server stream, read on a thread
threads.py      the threads that pulls borrow
heartbeat.py    keeps leases alive, gives them back
ranks.py        which bytes make up this rank's blocks
results.py      what threads hand to the step loop
"""
