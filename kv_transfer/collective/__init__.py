"""The `collective` transport, experimental: whole tensors through torch.distributed, one group for each pair of ranks.

Gloo has run, in the tests and in `docs/measurements.md`; NCCL has not. `auto` never picks it.

group.py   a group of two ranks
wire.py    the messages that both ends exchange over gRPC
source.py  the sending end
puller.py  the receiving end
"""
