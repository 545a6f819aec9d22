"""Roles that the tests launch; they must be importable by the workers."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.rpc as rpc
from running import LONG, preload_little

from cdopt_tutorial import scratch
from cdopt_tutorial.calls import gradients, network
from cdopt_tutorial.run import (
    Role,
    launch,
    process_group,
    report,
    serve,
    worker,
)

#: How a gradient crosses workers: by what is attached to them.
WAYS = {"distributed": None, "cut": gradients.cut_always}


class Counter:
    """Something to own on another worker."""

    def __init__(self):
        self.count = 0

    def add(self, values):
        self.count += 1
        return values + self.count

    def fail(self, kind):
        raise {"KeyError": KeyError, "ValueError": ValueError}[kind]("no such thing")

    @rpc.functions.async_execution
    def add_later(self, values):
        future = torch.futures.Future()
        threading.Timer(0, future.set_result, (values + 1,)).start()
        return future


def identify(*args):
    info = rpc.get_worker_info()
    return info.name, info.id, args


def write_as_it_ends(path):
    """Write the file in a thread, a moment after the main thread has ended."""

    def write():
        threading.main_thread().join()
        time.sleep(0.3)
        Path(path).touch()

    threading.Thread(target=write).start()


def call(other, method, *args):
    """Make a Counter on another worker and call one of its methods."""
    return getattr(rpc.remote(other, Counter).rpc_sync(), method)(*args)


def raise_error():
    raise ArithmeticError("seven times six")


def throw(error):
    raise error


def call_through(other, function, *args):
    """Run a function on another worker, over whatever carries calls."""
    return network.current().call(other, function, args)


def never_join():
    """Attached: a worker that is ready never joins the others."""

    def never(*_):
        time.sleep(LONG)

    worker.join = never


def raise_later():
    time.sleep(1)
    raise RuntimeError("seven times six")


def send_self(number):
    os.kill(os.getpid(), getattr(signal, number))
    time.sleep(LONG)


def threads_of_a_product():
    """How many threads a matrix product starts, in the calling thread."""
    x = torch.randn(400, 400)
    before = set(os.listdir("/proc/self/task"))
    torch.mm(x, x)
    return len(set(os.listdir("/proc/self/task")) - before)  # some may have ended


def prefer(device):
    """Have the environment ask for a network device."""
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = device


def meet_and_wait(rank, file):
    """Join a process group, report, and wait until there is a file."""
    process_group.join(rank, 2, gpus=())
    report(os.getpid())
    while not file.exists():
        time.sleep(0.05)


def hold_the_interpreter():
    """Keep all other threads of this process from running, for ages."""
    re.match("(a+)+$", 60 * "a" + "b")


def start_child_and_sleep():
    child = subprocess.Popen(["sleep", str(LONG)])
    report(child.pid)
    time.sleep(LONG)


def speak(records=()):
    """Report, warn, and print a line that does not end."""
    for record in records:
        report(record)
    warnings.warn("to be heeded", stacklevel=1)
    print("to be heard", end="")


class Unreadable:
    """What can be sent, but not received."""

    def __reduce__(self):
        return int, ("no number",)


class Silent(Exception):
    """An error whose text can't be made."""

    def __str__(self):
        raise ArithmeticError


def stop_in_a_message(size):
    """Be stopped while the pipe to the parent is full."""
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    while True:
        report(bytes(size))


class SlowToArrive:
    """Takes so many seconds to unpickle, before the worker can join."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __reduce__(self):
        return time.sleep, (self.seconds,)


def ask_for_module(other, function):
    """Whether another worker has imported the module of a function."""
    return rpc.rpc_sync(other, has_module, args=(function.__module__,))


def has_module(name):
    return name in sys.modules


def write_in_every_way():
    sys.stdout.reconfigure(line_buffering=True)
    sys.stdout.buffer.write(b"bytes\n")
    os.write(sys.stdout.fileno(), b"descriptor\n")
    if (child := os.fork()) == 0:
        print("forked")
        os._exit(0)
    os.waitpid(child, 0)
    assert sys.stdout.writable() and sys.stdout.encoding.lower() == "utf-8"


def launch_inside(rpc_timeout):
    preload_little()
    asking = Role(rpc.rpc_sync, ("e", abs, (-3,)))
    found = launch({"d": asking, "e": Role(serve)}, rpc_timeout=rpc_timeout)
    return found, scratch.folder()
