"""What engines of actors have in common: a driver, which starts and watches them."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, ClassVar

from cdopt_tutorial import torchrun
from cdopt_tutorial.engines import network_store, pack
from cdopt_tutorial.engines.actor import WorkerPlan
from cdopt_tutorial.engines.group import Group, show_line
from cdopt_tutorial.engines.launch import Role, launch
from cdopt_tutorial.engines.process import Settings, unpickled
from cdopt_tutorial.engines.workers import Workers


@dataclass(frozen=True)
class Plan:
    """What the driver is to do."""

    settings: Settings  #: of the run
    packed: Mapping[str, bytes]  #: the workers' roles, by name
    address: str | None  #: of a cluster that is there; None starts one here
    join_deadline: float  #: seconds until all actors must have been made

    def workers(self) -> list[WorkerPlan]:
        """What each actor needs; they look for modules where the driver does."""
        # Process groups meet at the first of them.
        meeting = f"{network_store.SCHEME}://{next(iter(self.packed))}"
        settings = replace(self.settings, meeting=meeting)
        return [
            WorkerPlan(settings, *each, sys.path, self.join_deadline)
            for each in self.packed.items()
        ]


@dataclass(frozen=True)
class OnActors(Workers, ABC):
    """Runs a system on actors; a ValueError if what they need is not installed."""

    way: str = "cut"
    title: ClassVar[str]  #: as its makers write it
    #: that it is called by, as are its driver and its extra of the package
    name: ClassVar[str]
    package: ClassVar[str]  #: what is imported

    def __post_init__(self):
        super().__post_init__()
        name, title = self.name, self.title
        if self.way != "cut":
            only = f"must be cut: {title} has no other"
            raise ValueError(f"way is {self.way!r}, but {only}")
        if find_spec(self.package) is None:
            missing = f"needs {title}, which is not here"
            install = f"pip install 'cdopt-tutorial[{name}]'"
            raise ValueError(f"the engine {name} {missing}: {install}")
        if torchrun.is_here():
            raise ValueError(
                f"the engine {name} starts its workers itself, not torchrun"
            )

    @abstractmethod
    def _driver(self) -> tuple[Callable[[Plan], dict[str, bytes]], str | None]:
        """The driver's role, and the address of a cluster that it is to use."""

    def _outside(self) -> AbstractContextManager[None]:
        """In what the driver is started: a run has a network of its own."""
        return nullcontext()

    def _end(self, folder: str) -> None:
        """End what a driver may have left that was ended itself; its run's folder."""

    def launch(self, roles: Mapping[str, Role], **options: Any) -> dict[str, Any]:
        """What each role returned, by name; as :func:`.launch`, with its options.

        What is of torch RPC has no meaning here: threads, polling; a trace or a wire
        is refused. Where the engine replaces workers, roles that are replaceable begin
        anew where their actor dies.
        """
        for name in ("trace", "wire"):
            if options.get(name) is not None:
                told = f"and not for the engine {self.name}"
                raise ValueError(f"{name} is for torch RPC, {told}")
        return launch(roles, play=self._play, **options)

    def _play(
        self,
        settings: Settings,
        packed: Mapping[str, bytes],
        on_report: Callable[[str, Any], None] | None,
        deadlines: tuple[float, float],
    ) -> dict[str, tuple[Any, None, None]]:
        def hand_on(_: str, told: tuple) -> None:
            worker, kind, *content = told
            if kind == "output":
                show_line(worker, *content)
            elif on_report is not None:
                on_report(worker, unpickled(worker, "reported", *content))

        drive, address = self._driver()
        plan = Plan(settings, packed, address, deadlines[1])
        content, modules = pack.pack({self.name: (None, Role(drive, (plan,)))})
        alone = replace(settings, world_size=1, modules=modules)
        with self._outside():
            try:
                done = Group(alone, content, hand_on).run(*deadlines)
            finally:
                self._end(settings.folder)
        results, _, _ = done[self.name]
        return {
            name: (unpickled(name, "returned", result), None, None)
            for name, result in results.items()
        }
