"""Imported by the fork server alone: with its parent it must leave at once.

A stopped worker goes only with the server, which Python would take seconds to end.
"""

import atexit
import os

atexit.register(os._exit, 0)
