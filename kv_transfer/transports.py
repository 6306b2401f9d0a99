"""The transports by their names in configuration, and how to build them.

`ridgeline.cluster.config.models` asks the pullers' classes here what settings they exclude.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from ridgeline.decode_worker.kv_fetch.fetcher import KvFetcher
from ridgeline.decode_worker.kv_fetch.grpc_puller import GrpcPuller
from ridgeline.decode_worker.kv_fetch.ipc_puller import IpcPuller
from ridgeline.decode_worker.kv_fetch.pinned import ShmPuller
from ridgeline.kv_transfer.collective.puller import CollectivePuller
from ridgeline.kv_transfer.collective.source import CollectiveSource
from ridgeline.kv_transfer.control import GrpcControl
from ridgeline.kv_transfer.faults import FaultPlan, FaultyPuller
from ridgeline.kv_transfer.interfaces import UNSUPPORTED, Puller
from ridgeline.kv_transfer.memory.ipc import CannotExport, IpcExport, export
from ridgeline.kv_transfer.memory.shared import SharedOffer
from ridgeline.kv_transfer.names import TRANSPORT_NAMES, TransportName
from ridgeline.kv_transfer.nixl.library import NixlFailed
from ridgeline.kv_transfer.nixl.puller import NixlPuller
from ridgeline.kv_transfer.nixl.source import NixlSource
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.kv_transfer.wire.frames import largest_frame_bytes
from ridgeline.prefill_worker.kv_source.block_server import RankCache
from ridgeline.prefill_worker.kv_source.grpc_source import GrpcKvSource, SourceExtension


def exports(
    layers: Sequence[torch.Tensor], shared: SharedOffer | None, transport: TransportName
) -> tuple[dict[str, dict[str, Any]], IpcExport | None]:
    """Return how peers reach these layers directly: by `shared`, if they are in host memory, and by CUDA IPC.

    The offer for `cuda-ipc` ends with the second of what is returned.

    The second only for a `transport` that may use it, so that otherwise nothing is asked of CUDA.
    """
    offers = {} if shared is None else {"shm": msgspec.to_builtins(shared)}
    if layers[0].device.type != "cuda" or transport not in ("auto", IpcPuller.name):
        return offers, None
    try:
        ipc = export(layers)
    except CannotExport as error:
        return {**offers, "cuda-ipc": {UNSUPPORTED: str(error)}}, None
    return {**offers, "cuda-ipc": msgspec.to_builtins(ipc.offer)}, ipc


def puller_class(name: str) -> type[Puller]:
    """Return the class of the transport that has this name, which is not `auto`. Raises ValueError if none has."""
    classes: list[type[Puller]] = [ShmPuller, IpcPuller, CollectivePuller, GrpcPuller, NixlPuller]
    for one in classes:
        if one.name == name:
            return one
    raise ValueError(f"unknown KV transport {name!r}; there are {', '.join(TRANSPORT_NAMES)}")


def make_transport(cache: RankCache, options: TransferOptions) -> tuple[GrpcKvSource, KvFetcher]:
    """Build both ends.

    Raises ValueError for an unknown transport, and for options that it or these blocks do not support.
    Every source serves all transports, `cuda-ipc` on a GPU or if it is named, `nixl` only if it is named;
    the name decides what this engine's own fetches use.
    """
    if options.transport != "auto":
        asked_for = puller_class(options.transport)
        if options.tls is not None and not asked_for.covered_by_tls:
            raise ValueError(f"{asked_for.name} moves bytes in plain text and does not work with TLS")
    control = GrpcControl(largest_frame_bytes(cache.layout), options.tls)
    extensions: list[SourceExtension] = []
    pullers: list[Puller] = [GrpcPuller(control)]
    on_gpu = cache.pool.device.type == "cuda"
    if on_gpu or options.transport == IpcPuller.name:
        pullers.append(IpcPuller(control, cache.pool.device, any_gpu=options.transport == IpcPuller.name))
    if not on_gpu or options.transport == ShmPuller.name:
        pullers.append(ShmPuller(control))
    if options.tls is None or CollectivePuller.covered_by_tls:
        extensions.append(CollectiveSource(cache.pool, options.host))
        pullers.append(CollectivePuller(control, cache.pool.device, options.host))
    if options.transport == "nixl":
        served, puller = _nixl(cache, control)
        extensions.append(served)
        pullers.append(puller)
    source = GrpcKvSource(cache, options, extensions)
    if options.faults:
        plan = FaultPlan.parse(options.faults)
        pullers = [FaultyPuller(puller, plan) for puller in pullers]
    return source, KvFetcher(cache.layout, control, pullers, options, cache.rank)


def _nixl(cache: RankCache, control: GrpcControl) -> tuple[SourceExtension, Puller]:
    try:
        return NixlSource(cache.pool), NixlPuller(control, cache.pool)
    except NixlFailed as error:
        raise ValueError(f"the transport nixl does not work here: {error}") from error
