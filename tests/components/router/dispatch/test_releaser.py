"""Hand-offs that nobody fetches are given back, and nothing is kept of workers that are gone."""

import asyncio

from ridgeline.kv_transfer.control import GrpcControl
from ridgeline.router.dispatch.orchestrator import HandoffReleaser
from tests.support.patience import eventually
from tests.support.samples import make_handoff


async def test_nothing_is_kept_of_a_worker_that_is_gone_told_or_found_out(monkeypatch):
    monkeypatch.setattr("ridgeline.kv_transfer.control.RELEASE_RETRY_DELAYS_S", ())
    asked, released = [], []

    async def release(self, address, handoff_id, reader=0, readers=1):
        self.channel(address)
        asked.append(handoff_id)
        if handoff_id == "dead":
            return await GrpcControl._call(self, address, "Release", handoff_id)
        return released.append(handoff_id)

    monkeypatch.setattr(GrpcControl, "release", release)
    releaser = HandoffReleaser()
    running = asyncio.create_task(releaser.run())
    releaser.release(make_handoff("live"))
    await eventually(lambda: released)
    assert releaser._control.known() == {"127.0.0.1:7001"}
    releaser.forget(["127.0.0.1:7001", "127.0.0.1:7002"])
    assert releaser._control.known() == set()
    # A worker that was lost is forgotten first, and then the hand-offs of its requests are given back.
    releaser.release(make_handoff("dead"))
    await eventually(lambda: asked[-1] == "dead")
    await eventually(lambda: not releaser._control.known(), 10)
    running.cancel()
    await asyncio.wait([running])
