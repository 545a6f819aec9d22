"""Say in one line what this machine lacks to install the book; runs on any Python."""

import os
import sys

NEEDED_GB = 4


def missing():
    """Return what is missing, or None."""
    have = "{}.{}".format(*sys.version_info)
    if sys.version_info < (3, 11):  # noqa: UP036
        return "Python is " + have + ": 3.11 is needed; make PYTHON=... names another"
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return "Python has no venv module: apt install python{}-venv".format(have)  # noqa: UP032
    disk = os.statvfs(".")
    free = disk.f_bavail * disk.f_frsize / 1e9
    if free < NEEDED_GB:
        return "{:.1f} GB of disk are free here: {} GB are needed".format(  # noqa: UP032
            free, NEEDED_GB
        )
    return None


if __name__ == "__main__":
    problem = missing()
    if problem:
        sys.exit(problem)
