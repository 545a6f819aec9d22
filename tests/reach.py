"""Print what another user can read, write or enter below folders, a path per line."""

import os
import sys

MODES = {"r": os.R_OK, "w": os.W_OK, "x": os.X_OK}

if __name__ == "__main__":
    user, *folders = sys.argv[1:]
    os.setgroups([])
    os.setgid(int(user))
    os.setuid(int(user))
    for top in folders:
        for folder, below, files in os.walk(top):
            for path in (os.path.join(folder, name) for name in below + files):
                if os.path.islink(path):  # what it names is asked for where it lies
                    continue
                can = "".join(k for k, mode in MODES.items() if os.access(path, mode))
                if can:
                    print(can, path)
