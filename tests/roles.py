"""Roles that the tests launch; they must be importable by the workers."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import torch
import torch.distributed.rpc as rpc

from cdopt_tutorial.engines import report, span
from cdopt_tutorial.engines.reference import Ref


class TwoArguments(Exception):
    """An exception that can't be made again from its text alone."""

    def __init__(self, what, why):
        super().__init__(f"{what}: {why}")


class Counter:
    """Something to own on another worker."""

    def __init__(self):
        self.count = 0

    def add(self, values):
        self.count += 1
        return values + self.count

    def fail(self, kind):
        raise {"KeyError": KeyError, "ValueError": ValueError}[kind]("no such thing")

    def fail_oddly(self):
        raise TwoArguments("odd", "very")

    @rpc.functions.async_execution
    def add_later(self, values):
        future = torch.futures.Future()
        future.set_result(values + 1)
        return future


def identify(*args, **kwargs):
    info = rpc.get_worker_info()
    return info.name, info.id, args, kwargs


def give_tensor(size):
    return torch.arange(float(size))


def give_unpicklable():
    return lambda: None


def call(other, method, *args):
    """Make a Counter on another worker and call one of its methods."""
    rref = rpc.remote(other, Counter)
    with span("calling"):
        return getattr(rref.rpc_sync(), method)(*args)


def converse(other, calls):
    """Calls of every kind: remote, sync, async, answered later."""
    rref = rpc.remote(other, Counter)
    for _ in range(calls):
        rref.rpc_sync().add(torch.ones(3))
    rref.rpc_async().add(torch.ones(5)).wait()
    rref.rpc_sync().add_later(torch.ones(2))
    return rpc.rpc_sync(other, identify)[0]


def pass_on(middle, last):
    """A call that fails two workers away."""
    return rpc.rpc_sync(middle, call, args=(last, "fail", "ValueError"))


def sleep(seconds):
    time.sleep(seconds)


def sleep_on(other, seconds):
    rpc.rpc_sync(other, sleep, args=(seconds,))


def raise_error():
    raise ArithmeticError("seven times six")


def raise_odd_error():
    raise TwoArguments("seven", "times six")


def leave(code):
    os._exit(code)


def exit_politely():
    sys.exit(4)


def send_self(number):
    os.kill(os.getpid(), getattr(signal, number))
    time.sleep(60)


def stop_in_a_message(size):
    """Be stopped while the pipe to the parent is full."""
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    while True:
        report(bytes(size))


def report_and_sleep(seconds):
    report(os.getpid())
    time.sleep(seconds)


def report_all(records):
    for record in records:
        report(record)


def start_child_and_sleep():
    child = subprocess.Popen(["sleep", "300"])
    report(child.pid)
    time.sleep(300)


def speak():
    print("to be heard")
    warnings.warn("to be heeded", stacklevel=1)


class SlowToArrive:
    """Takes its time in the worker, before the worker can join."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __reduce__(self):
        return _arrive, (self.seconds, os.getpid())


def _arrive(seconds, sender):
    if os.getpid() != sender:
        time.sleep(seconds)
    return SlowToArrive(seconds)


def hooked():
    """Whether this worker's RPC is recorded."""
    from torch.distributed.rpc import api, internal

    return api._default_pickler is not internal._internal_rpc_pickler


def offer_counter():
    return Ref.to(Counter())


def use_reference(other):
    """Calls through a reference to an object that another worker made."""
    ref = rpc.rpc_sync(other, offer_counter)
    counter = ref.rpc_sync()
    results = [ref.worker, counter.add(10), counter.add(10), counter.add_later(5)]
    try:
        counter.fail("ValueError")
    except ValueError as error:
        results.append("no such thing" if "no such thing" in str(error) else str(error))
    return results


def ask_for_module(other, function):
    """Whether another worker has the module of a function, before it is called."""
    return rpc.rpc_sync(other, has_module, args=(function.__module__,))


def has_module(name):
    return name in sys.modules


def make_lock(other):
    """An object that could not be sent, made where it is to stay."""
    rref = rpc.remote(other, threading.Lock)
    return rpc.rpc_sync(other, is_locked, args=(rref,))


def is_locked(rref):
    return rref.local_value().locked()
