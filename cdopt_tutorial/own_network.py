"""A network of its own for the fork server, and for the workers that it starts.

torch RPC runs whatever it is sent, by anybody, and every user of a machine can reach
its loopback device. So workers get a network namespace to themselves; see
namespaces(7).

Only Python's own modules are imported here: a process with threads, such as numpy's,
may not enter a user namespace.
"""

import ctypes
import fcntl
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

VARIABLE = "CDOPT_TUTORIAL_NETWORK"  # "host": workers stay in the machine's network

# Of <sched.h>, <linux/prctl.h>, <linux/capability.h>, <linux/sockios.h>, <linux/if.h>.
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
PR_SET_DUMPABLE, CAPABILITIES_3, SIOCSIFFLAGS, IFF_UP = 4, 0x20080522, 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


def enter() -> None:
    """Move this process into a network of its own; OSError where that is refused."""
    user, group, own = os.getuid(), os.getgid(), 0
    try:
        _check(_libc.unshare(CLONE_NEWNET))
    except PermissionError:  # a user other than root may as root of a namespace
        own = CLONE_NEWUSER
        _check(_libc.unshare(own | CLONE_NEWNET))
        # Else its user's other processes, which share memory with it, can't see it.
        _libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        # Be the same user and group inside as outside.
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        up = struct.pack("16sh22x", b"lo", IFF_UP)
        fcntl.ioctl(device, SIOCSIFFLAGS, up)
    if own:  # drop the namespace's rights: children can't see a process with more
        _check(_libc.capset(struct.pack("Ii", CAPABILITIES_3, 0), bytes(24)))


def _check(failed: int) -> None:
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def is_allowed() -> bool:
    """Try it in a process of its own, since one that fails halfway is of no use."""
    child = os.fork()
    if child == 0:
        with suppress(OSError):
            enter()
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
