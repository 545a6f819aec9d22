"""Chapters 2 and 4: an RNN split over a trainer and a parameter server."""

from cdopt_tutorial.parameter_server import checkpoint, traffic
from cdopt_tutorial.parameter_server.model import History, RNNConfig, build_all, sample
from cdopt_tutorial.parameter_server.system import Job, Trainer, check, run, run_locally
