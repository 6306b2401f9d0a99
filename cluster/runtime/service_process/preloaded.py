"""A parent that has imported what services need, and forks one for each connection.

It makes no thread, no event loop and no CUDA context, so that its children can. What they have from it they share in
memory. Its arguments are the number of a listening socket and the modules' names. It ends when its standard input does,
and removes the socket's folder, since the driver may have been killed.
"""

from __future__ import annotations

import gc
import os
import select
import shutil
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from ridgeline.cluster.runtime.service_process.child import run


def main(listener: socket.socket, modules: list[str]) -> None:
    """Import, then fork a child for each connection; who connects while this still imports has only to wait.

    What cannot be imported ends this: a module fails in another way when it is imported again, and a service that is
    started afresh meets, and tells, the first one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # it would look at the modules' objects again and again: a third of the CPU time of importing them
    for module in modules:
        import_module(module)
    gc.freeze()  # a child's garbage collector need not look at, and so copy, what it has from here
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then collects children that have ended
    while sys.stdin not in (ready := select.select([listener, sys.stdin], [], [])[0]):
        if listener in ready:
            connection, _ = listener.accept()
            with connection, suppress(OSError):  # no memory for another process: the connection ends
                if os.fork() == 0:
                    listener.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    run(connection)


if __name__ == "__main__":
    connections = socket.socket(fileno=int(sys.argv[1]))
    main(connections, sys.argv[2:])
    shutil.rmtree(Path(connections.getsockname()).parent, ignore_errors=True)
    os._exit(0)  # nothing here needs the seconds that Python takes to clear all this away
