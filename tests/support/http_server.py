"""Serves any app with a real uvicorn, without the tenths of a second that uvicorn's own loop waits."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn


@asynccontextmanager
async def listening(app: Any, **options: Any) -> AsyncIterator[str]:
    """Serve on a free port of this machine while the block runs; yield the URL."""
    config = uvicorn.Config(app, port=0, ws="none", lifespan="off", **{"log_level": "error", **options})
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        for listener in server.servers:
            listener.close()
        for connection in list(server.server_state.connections):
            connection.shutdown()
        for task in server.server_state.tasks:
            task.cancel()
