"""The engine of torch RPC: one group of workers on this host, or under torchrun."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cdopt_tutorial.engines.launcher.launch import Role, launch
from cdopt_tutorial.engines.workers import Workers


@dataclass(frozen=True)
class TorchRPC(Workers):
    """Runs a system on workers that call each other by torch RPC."""

    def launch(self, roles: Mapping[str, Role], **options: Any) -> dict[str, Any]:
        """What each role returned, by name; as :func:`.launch`, with its options."""
        return launch(roles, **options)
