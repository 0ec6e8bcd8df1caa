"""A dispatcher or a worker in a process of its own, run by `test_tf_data_service`.

It prints its address, and ends when its parent does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from stratagem.input.service.address_book import DispatcherConfig, DispatchServer
from stratagem.input.service.workers import WorkerConfig, WorkerServer


def _end_with_parent() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def main() -> None:
    kind, arguments = sys.argv[1], json.loads(sys.argv[2])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if kind == "dispatcher":
        server = DispatchServer(DispatcherConfig(**arguments))
        print(server.target, flush=True)
    else:
        server = WorkerServer(WorkerConfig(**arguments))
        print(server.address, flush=True)
    server.join()


if __name__ == "__main__":
    main()
