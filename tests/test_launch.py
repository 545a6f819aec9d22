"""The launcher: what comes back, what is refused, and what a failure looks like."""

import math
import os
import pickle
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import hybrid_roles
import psutil
import pytest
import roles
import torch
import torch.distributed.rpc as rpc
from hosts import PATIENCE, wait_until
from running import LONG, Script, listeners, wait_for_end

from cdopt_tutorial import scratch, torchrun
from cdopt_tutorial.run import Role, WorkerError, forking, group, launch, serve
from cdopt_tutorial.run.worker import LOOPBACK

pytestmark = pytest.mark.usefixtures("limited")


def workers_alive():
    """Processes forked for workers of this test process, zombies included."""
    return [p for p in psutil.Process().children(recursive=True) if p.name() != "sleep"]


@pytest.fixture(scope="module", autouse=True)
def fork_server():
    launch({"warm": Role(serve)})  # the fork server stays


@pytest.fixture(autouse=True)
def nothing_left_behind(fork_server):
    before = {p.pid for p in workers_alive()}
    yield
    assert {p.pid for p in workers_alive()} == before


def calling(worker, function, *args, **kwargs):
    """A role that is one call."""
    return Role(rpc.rpc_sync, (worker, function, args, kwargs))


def failure(roles_, **options):
    with pytest.raises(WorkerError) as caught:
        launch(roles_, **options)
    return caught.value


@pytest.mark.parametrize("name", ["TORCHELASTIC_RUN_ID", "RANK"])
def test_a_single_variable_is_not_torchrun(name, monkeypatch):
    # MPI and others set a RANK, too.
    monkeypatch.setenv(name, "0")
    assert not torchrun.is_here()


class TestResults:
    def test_each_role_gets_its_name_its_rank_and_its_arguments(self):
        # One run after another, with other sizes and ranks.
        for names in ("cba", "ab"):
            given = (1,), {"two": 2}
            results = launch({name: Role(roles.identify, *given) for name in names})
            assert results == {name: (name, i, *given) for i, name in enumerate(names)}

    def test_what_workers_return_report_and_print_arrives(self, capsys):
        records, folder, modes = [], Path(scratch.folder()), []

        def on_report(*record):
            records.append(record)
            modes.append(folder.stat().st_mode & 0o777)
            assert [*folder.glob("*/worker.role")]

        system = {
            "worker": Role(roles.speak, (range(50),)),
            "caller": calling("other", print, "half", end=""),
            "other": Role(torch.arange, (100_000.0,)),
        }
        results = launch(system, on_report=on_report)
        assert torch.equal(results["other"], torch.arange(100_000.0))
        assert results["worker"] is None
        assert records == [("worker", number) for number in range(50)]  # in order
        captured = capsys.readouterr()
        said = ["[other] half", "[worker] to be heard"]
        assert sorted(captured.out.splitlines()) == said
        assert "[worker]" in captured.err and "to be heeded" in captured.err
        # Nobody else can read the files of the run, and none stays.
        assert set(modes) == {0o700}
        assert not list(folder.glob("*/worker.role"))

    def test_the_last_line_is_printed_even_if_it_does_not_end(self, capsys):
        with pytest.raises(WorkerError, match="^agent raised ArithmeticError"):
            launch({"agent": Role(roles.speak_half)})
        assert capsys.readouterr().out == "[agent] half a line\n"

    def test_a_run_says_nothing_of_itself_and_ends_by_itself(self, capfd, tmp_path):
        system = {
            "agent": Role(roles.converse, ("other", 2)),
            "asking": Role(roles.ask_for_module, ("other", hybrid_roles.kept)),
            "ending": Role(roles.write_as_it_ends, (tmp_path / "file",)),
            "other": Role(serve),
        }
        found = launch(system)
        assert capfd.readouterr() == ("", "")
        # All import what any role needs, before threads that answer calls could do so
        # at the same time.
        assert found["asking"] is True
        assert (tmp_path / "file").exists()  # so the worker was not killed


@pytest.mark.usefixtures("no_process_starts")
class TestRefusal:
    def test_names_that_rpc_does_not_allow_no_roles_and_no_threads(self):
        for name in ("", "with space", "a/b", "ä"):
            with pytest.raises(ValueError, match="can't name a worker"):
                launch({name: Role(serve)})
        with pytest.raises(ValueError, match="at least one"):
            launch({})
        with pytest.raises(ValueError, match="num_threads is 0, but must be above 0"):
            launch({"worker": Role(serve, num_threads=0)})

    @pytest.mark.parametrize(
        ("option", "values", "allowed"),
        [
            ("deadline", [0, -1, math.nan], "above 0"),
            ("join_deadline", [0], "above 0"),
            (
                "rpc_timeout",
                [-1, math.nan, math.inf, 1e7],
                "from 0, for never, to 2e.06",
            ),
            ("rpc_threads", [0, 0.5, 257], "a whole number from 1 to 256"),
        ],
    )
    def test_a_number_out_of_range(self, option, values, allowed):
        for value in values:
            refused = f"^{option} is {value}, but must be {allowed}"
            with pytest.raises(ValueError, match=refused):
                launch({"worker": Role(serve)}, **{option: value})


#: The headline, a part of the details, and the system that fails so.
FAILURES = [
    ("a exited with code 0 before it finished", "", {"a": Role(os._exit, (0,))}),
    ("a exited with code 4 before it finished", "", {"a": Role(sys.exit, (4,))}),
    ("a returned what can't be unpickled", "no number", {"a": Role(roles.Unreadable)}),
    ("a reported what can't be unpickled", "no number",
     {"a": Role(roles.report_unreadable)}),
    ("a raised Silent", "", {"a": Role(roles.raise_silent)}),
    # And not the one that has lost it.
    ("b raised RuntimeError", "seven times six",
     {"a": Role(roles.lose_peer), "b": Role(roles.raise_later)}),
    ("a was stopped (SIGSTOP) and did not go on", "",
     {"a": Role(roles.stop_in_a_message, (1_000_000,))}),
]  # fmt: skip


class TestFailure:
    @pytest.fixture(autouse=True)
    def patient(self, monkeypatch):
        """What explains a lost peer is waited for, on however busy a machine."""
        monkeypatch.setattr(group, "GRACE_LOST_PEER", PATIENCE)

    @pytest.mark.parametrize("headline, more, system", FAILURES)
    def test_one_line_says_who_failed_and_why(self, headline, more, system):
        error = failure(system)
        assert error.headline == headline
        assert more in error.details

    def test_an_exception_names_the_worker_and_carries_its_traceback(self):
        error = failure({"agent": Role(serve), "observer0": Role(roles.raise_error)})
        assert error.worker == "observer0"
        assert error.headline == "observer0 raised ArithmeticError"
        assert "in raise_error" in error.details
        assert "seven times six" in str(error)
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.worker) == (str(error), "observer0")

    def test_one_that_is_killed_as_it_starts_is_named(self, monkeypatch):
        def start(process):  # as multiprocessing's does if the worker is gone
            raise EOFError

        monkeypatch.setattr(forking.Process, "start", start)
        error = failure({"agent": Role(serve)})
        said = "could not be started: what starts workers ended, see stderr"
        assert error.headline == f"agent {said}"

    @pytest.mark.parametrize(
        ("made", "kind"),
        [  # the first of them by way of a third worker
            (calling("b", roles.call, "c", "fail", "KeyError"), "KeyError"),
            (Role(roles.call, ("c", "fail_oddly")), "TwoArguments"),
        ],
    )
    def test_an_exception_in_a_call_names_the_callee(self, made, kind):
        error = failure({"a": made, "b": Role(serve), "c": Role(serve)})
        assert error.headline == f"c raised {kind} in a call that a made"
        assert "in fail" in error.details
        assert "\\n" not in error.details

    @pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
    def test_who_is_killed_or_stopped_is_named_not_who_waits_for_it(self, number):
        stopped = "was stopped (SIGSTOP) and did not go on"
        reason = stopped if number == "SIGSTOP" else "was killed by SIGKILL"
        system = {
            "agent": calling("observer0", time.sleep, LONG),
            # It fails before a worker has been stopped for long enough to count.
            "peer": Role(roles.lose_peer),
            "observer0": Role(roles.send_self, (number,)),
        }
        error = failure(system, polling=number == "SIGKILL")
        assert error.headline == f"observer0 {reason}"

    def test_a_worker_that_is_stopped_as_it_starts(self):
        # It would read its role for long.
        before = set(workers_alive())

        def catch():
            while not (born := set(workers_alive()) - before):
                time.sleep(0.001)
            born.pop().suspend()

        role = Role(roles.identify, (bytes(30_000_000), roles.SlowToArrive(LONG)))
        threading.Thread(target=catch).start()
        assert failure({"late": role}).headline.startswith("late was stopped")

    def test_a_worker_that_never_joins(self):
        late = Role(roles.identify, (roles.SlowToArrive(LONG),))
        error = failure({"a": Role(serve), "late": late}, join_deadline=15)
        assert error.headline == "late missed the deadline of 15 s to join"

    def test_the_deadline_of_the_run(self):
        both = {"a": Role(serve), "b": Role(roles.sleep, (LONG,))}
        error = failure(both, deadline=15)
        assert error.headline == "b missed the run's deadline of 15 s"
        assert "in sleep" in error.details  # where it was

    def test_the_deadline_of_a_run_of_which_a_call_is_all_that_is_left(self):
        caller = Role(roles.leave_call, ("b", LONG))
        error = failure({"a": caller, "b": Role(serve)}, deadline=15)
        assert error.headline == "a missed the run's deadline of 15 s (and b)"

    def test_an_error_here_ends_the_run_and_what_its_workers_started(self):
        children = []

        def on_report(_, pid):
            children.append(psutil.Process(pid))
            raise LookupError

        with pytest.raises(LookupError):
            launch({"worker": Role(roles.start_child_and_sleep)}, on_report=on_report)
        gone, _ = psutil.wait_procs(children, timeout=PATIENCE)
        assert gone == children


SCRIPT = f"""
import roles
from cdopt_tutorial.run import Role, launch
from cdopt_tutorial.run import group
from running import preload_little
preload_little()
group.STOPPED = {LONG}  # or it would end the run
named = {{
    "waits": Role(roles.report_and_sleep, ({LONG},)),
    "busy": Role(roles.sleep, ({LONG},)),
    "stopped": Role(roles.send_self, ("SIGSTOP",)),
    "deaf": Role(roles.hold_the_interpreter),
}}
launch(named, on_report=lambda _, pid: print(pid, flush=True))
"""


def test_workers_go_with_a_killed_parent(tmp_path):
    """All workers, their server and the files of the run, with no help from it."""
    place = tmp_path / "temporary"
    place.mkdir()

    def all_run():
        stopped = process.named().get("stopped")
        return stopped and stopped.status() == psutil.STATUS_STOPPED

    with Script(SCRIPT, place) as process:
        first = int(process.stdout.readline())
        wait_until(all_run)
        # The tracker of multiprocessing is Python's own.
        below = process.below()
        below = [each for each in below if "tracker" not in str(each.cmdline())]
        (server,) = {psutil.Process(first).ppid()} & {each.pid for each in below}
        psutil.Process(server).suspend()
        assert len(below) == 5 and [*place.glob("*/*/waits.role")]
        process.kill()
    try:
        wait_for_end(below)
        assert not [*place.glob("cdopt*")]
    finally:
        for each in below:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def test_workers_listen_on_loopback_only(tmp_path):
    # Whatever the environment and the host name suggest.
    others = set(psutil.net_if_addrs()) - {LOOPBACK}
    prefer = partial(roles.prefer, min(others, default="none0"))
    listening = []
    seen = tmp_path / "seen"
    system = {str(rank): Role(roles.meet_and_wait, (rank, seen)) for rank in range(2)}

    def on_report(_, pid):
        listening.append(listeners(pid)[0])
        if len(listening) == 2:
            seen.touch()

    launch(system, attach=prefer, on_report=on_report)
    assert len(listening) == 2 and all(listening)
    assert {ip for each in listening for ip, _ in each} <= {"127.0.0.1", "::1"}
