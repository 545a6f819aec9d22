"""Can these hosts run together? Start `torchrun ... check_hosts.py` on each of them."""

import argparse
import fcntl
import os
import platform
import socket
import threading
import warnings
from contextlib import suppress
from timeit import repeat

import torch
from torch.distributed import rpc

warnings.simplefilter("ignore")  # `init_rpc` causes one, whatever we do
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--timeout", type=float, default=60, help="seconds for everything")
timeout = parser.parse_args().timeout


def give_up():  # in a thread of its own, because torch may wait for ever
    threading.Event().wait(timeout)
    print(f"{own}: no {step} within {timeout:g} s", flush=True)
    os._exit(1)


def device_to(host):  # the network device that leads there, and our address on it
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.connect((host, 1))  # sends nothing
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address; 0x8915 is SIOCGIFADDR
                found = fcntl.ioctl(end, 0x8915, name.encode().ljust(40, b"\0"))
                if socket.inet_ntoa(found[20:24]) == end.getsockname()[0]:
                    return name, end.getsockname()[0]


device, address = device_to(os.environ["MASTER_ADDR"])  # which torchrun has set
os.environ.setdefault("TP_SOCKET_IFNAME", device)  # else torch goes by the host's name
device = os.environ.setdefault("GLOO_SOCKET_IFNAME", device)
own, step = f"{socket.gethostname()}, {address}, listening on {device}", "store"
threading.Thread(target=give_up, daemon=True).start()
store, rank, size = next(torch.distributed.rendezvous("env://"))
versions = f"Python {platform.python_version()}, torch {torch.__version__}"
store.multi_set([f"host{rank}", f"versions{rank}"], [own, versions])
for i in range(size):
    step = f"sign of rank {i}"
    host, has = map(bytes.decode, store.multi_get([f"host{i}", f"versions{i}"]))
    differs = "" if has == versions else f", but {own} has {versions}"
    print(f"rank {i} is {host}: {has}{differs}", flush=True)
peer, step = (rank + 1) % size, f"answer to a call to rank {(rank + 1) % size}"
options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=2 * timeout)
rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size, rpc_backend_options=options)
times = repeat(lambda: rpc.rpc_sync(f"rank{peer}", os.getpid), number=1)
step = "end of an all-reduce"
torch.distributed.init_process_group("gloo")
torch.distributed.all_reduce(ranks := torch.full([4096], rank))
assert ranks.eq(size * (size - 1) // 2).all(), "an all-reduce gave a wrong sum"
rpc.shutdown()
print(f"a call to rank {peer} takes {1e3 * min(times):.1f} ms, an all-reduce is right")
