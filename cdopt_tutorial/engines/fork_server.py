"""Imported by the fork server alone, which must leave at once when its parent has gone.

A worker that is stopped goes only with the server, and Python takes a second or two to
take down all that the server has imported.
"""

import atexit
import os

atexit.register(os._exit, 0)
