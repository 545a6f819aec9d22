"""The engine of torch RPC: one group of workers on this host, or under torchrun."""

from dataclasses import dataclass

from cdopt_tutorial.engines.workers import Workers


@dataclass(frozen=True)
class TorchRPC(Workers):
    """Runs a system on workers that call each other by torch RPC."""
