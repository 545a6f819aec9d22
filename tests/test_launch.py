"""The launcher: what comes back, what is refused, and what a failure looks like."""

import math
import os
import pickle
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from pathlib import Path

import elsewhere
import psutil
import pytest
import roles
import torch
import torch.distributed.rpc as rpc
from hosts import PATIENCE, wait_until
from running import LONG, Script, end_server, listeners, wait_for_end

from cdopt_tutorial import scratch
from cdopt_tutorial.calls.errors import has_lost_peer
from cdopt_tutorial.run import Role, Wire, WorkerError, group, launch, report, serve
from cdopt_tutorial.run.launch import LONGEST
from cdopt_tutorial.run.worker import sender

pytestmark = pytest.mark.usefixtures("limited")
SERVE = Role(serve)


def workers_alive():
    """Processes forked for workers of this test process, zombies included."""
    return [p for p in psutil.Process().children(recursive=True) if p.name() != "sleep"]


@pytest.fixture(scope="module", autouse=True)
def fork_server():
    launch({"warm": SERVE})  # the fork server stays


def calling(worker, function, *args, **kwargs):
    """A role that is one call."""
    return Role(rpc.rpc_sync, (worker, function, args, kwargs))


def failure(roles_, **options):
    with pytest.raises(WorkerError) as caught:
        launch(roles_, **options)
    return caught.value


class TestResults:
    def test_each_role_gets_its_name_its_rank_and_its_arguments(self):
        # One run after another, with other sizes and ranks.
        for names in ("cba", "ab"):
            results = launch({name: Role(roles.identify, (1, 2)) for name in names})
            assert results == {name: (name, i, (1, 2)) for i, name in enumerate(names)}

    def test_what_workers_return_report_and_print_arrives(self, capfd):
        records, folder, modes = [], Path(scratch.folder()), []

        def on_report(*record):
            records.append(record)
            modes.append(folder.stat().st_mode & 0o777)
            assert [*folder.glob("*/worker.log")]

        system = {
            "worker": Role(roles.speak, (range(50),)),
            "caller": calling("other", print, "half", end=""),
            "writer": Role(roles.write_in_every_way),
            "other": Role(torch.arange, (100_000.0,)),
        }
        results = launch(system, on_report=on_report)
        assert torch.equal(results["other"], torch.arange(100_000.0))
        assert results["worker"] is None
        assert records == [("worker", number) for number in range(50)]  # in order
        captured = capfd.readouterr()
        # But what is forked of a worker, or has its descriptor, writes to the log.
        said = ["[other] half", "[worker] to be heard", "[writer] bytes"]
        assert sorted(captured.out.splitlines()) == said
        assert "[worker]" in captured.err and "to be heeded" in captured.err
        # Nobody else can read the files of the run, and none stays.
        assert set(modes) == {0o700}
        assert not list(folder.glob("*/worker.log"))

    def test_messages_of_several_threads_stay_whole(self):
        ours, theirs = Pipe()
        send, messages = sender(theirs), [bytes([n]) * 1_000_000 for n in range(8)]
        with ours, theirs, ThreadPoolExecutor(4) as threads:
            threads.map(send, messages)
            one = group._Worker(name="a", process=None, pid=0, control=ours)
            come: list = []
            while len(come) < len(messages) and ours.poll(PATIENCE):
                come += one.messages()
            assert sorted(come) == [(m,) for m in messages]

    def test_a_run_says_nothing_of_itself_and_ends_by_itself(self, capfd, tmp_path):
        system = {
            "agent": Role(roles.call, ("other", "add_later", torch.ones(2))),
            "asking": Role(roles.ask_for_module, ("other", elsewhere.where)),
            "ending": Role(roles.write_as_it_ends, (tmp_path / "file",)),
            "other": SERVE,
        }
        found = launch(system)
        assert capfd.readouterr() == ("", "")
        # All import what any role needs, before threads that answer calls could do so
        # at the same time.
        assert found["asking"] is True
        assert (tmp_path / "file").exists()  # so the worker was not killed

    def test_workers_are_as_this_process_is_now(self, monkeypatch, tmp_path):
        """And not as it was when the fork server began."""
        cpus, files = os.sched_getaffinity(0), resource.RLIMIT_NOFILE

        def state():
            seen = os.environ.get("OF_A_TEST"), os.getcwd(), os.sched_getaffinity(0)
            return *seen, resource.getrlimit(files)

        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("OF_A_TEST", "changed")
        before = resource.getrlimit(files)
        resource.setrlimit(files, (before[0] - 1, before[1]))
        os.sched_setaffinity(0, {min(cpus)})
        try:
            now = "changed", str(tmp_path), {min(cpus)}, resource.getrlimit(files)
            assert launch({"a": Role(state)}) == {"a": now}
        finally:
            os.sched_setaffinity(0, cpus)
            resource.setrlimit(files, before)

    def test_a_worker_does_what_any_process_does_and_may_take_for_ever(self):
        """And no number turns into another."""
        system = {
            "a": calling("b", abs, -1),
            "b": Role(roles.launch_inside, (LONGEST,)),
        }
        endless = {"deadline": math.inf, "join_deadline": 1e12, "rpc_timeout": 0}
        found = launch(system, **endless)
        inner, folder = found["b"]
        assert found["a"] == 1 and inner == {"d": 3, "e": None}
        assert not Path(folder).exists()


#: What is refused: a part of what is said, the roles, and an option.
REFUSED = [
    *(("can't name a worker", {name: SERVE}, {})
      for name in ("", "a/b", "ä")),
    ("at least one", {}, {}),
    ("num_threads is 0, but must be above 0", {"a": Role(serve, num_threads=0)}, {}),
    *((f"{name} is nan, but must be above 0", {"a": SERVE}, {name: math.nan})
      for name in ("deadline", "join_deadline")),
    *(("but must be from 0, for never, to 2e.06", {"a": SERVE}, {"rpc_timeout": value})
      for value in (-1, math.nan, 1e7)),
    *(("but must be a whole number from 1 to 256", {"a": SERVE}, {"rpc_threads": value})
      for value in (0, 0.5, 257)),
    ("a: its role can't be sent to a worker: TypeError: cannot pickle an open file",
     {"a": Role(print, (sys.__stderr__,))}, {}),
    ("polling is True, but must be False", {"a": SERVE},
     {"polling": True, "wire": Wire()}),
]  # fmt: skip


@pytest.mark.usefixtures("no_process_starts")
class TestRefusal:
    @pytest.mark.parametrize("said, system, options", REFUSED)
    def test_of_bad_input(self, said, system, options):
        with pytest.raises(ValueError, match=said):
            launch(system, **options)

    def test_of_a_folder_that_is_gone(self, tmp_path, monkeypatch):
        (folder := tmp_path / "gone").mkdir()
        monkeypatch.chdir(folder)
        folder.rmdir()
        with pytest.raises(OSError, match=f"the working folder is gone: {folder}$"):
            launch({"a": SERVE})


# As gloo says it.
LOSES_PEER = Role(roles.throw, (RuntimeError("Connection closed by peer"),))
#: The headline, a part of the details, the system that fails so, and its options.
FAILURES = [
    ("a exited with code 0 before it finished", "", {"a": Role(os._exit, (0,))}, {}),
    ("a exited with code 1 before it finished", "disk is full",
     {"a": Role(sys.exit, ("disk is full",))}, {}),
    ("a was killed by signal 40", "",
     {"a": Role(lambda: os.kill(os.getpid(), 40))}, {}),
    ("a returned what can't be unpickled", "no number",
     {"a": Role(roles.Unreadable)}, {}),
    ("a reported what can't be unpickled", "no number",
     {"a": Role(lambda: report(roles.Unreadable()))}, {}),
    ("a raised Silent", "", {"a": Role(roles.throw, (roles.Silent(),))}, {}),
    ("b raised ArithmeticError", "in raise_error",
     {"a": SERVE, "b": Role(roles.raise_error)}, {}),
    # And not the one that has lost it.
    ("b raised RuntimeError", "seven times six",
     {"a": LOSES_PEER, "b": Role(roles.raise_later)}, {}),
    # The callee, at first by way of a third worker.
    ("c raised KeyError in a call that a made", "in fail",
     {"a": calling("b", roles.call, "c", "fail", "KeyError"), "b": SERVE, "c": SERVE},
     {}),
    # Not the one that waits for it, nor the one that fails before a worker has been
    # stopped for long enough to count.
    ("b was killed by SIGKILL", "",
     {"a": calling("b", time.sleep, LONG), "c": LOSES_PEER,
      "b": Role(roles.send_self, ("SIGKILL",))}, {"polling": True}),
    ("b was stopped (SIGSTOP) and did not go on", "",
     {"a": calling("b", time.sleep, LONG), "c": LOSES_PEER,
      "b": Role(roles.send_self, ("SIGSTOP",))}, {}),
    ("a was stopped (SIGSTOP) and did not go on", "",
     {"a": Role(roles.stop_in_a_message, (1_000_000,))}, {}),
]  # fmt: skip
LATE = [
    ("b missed the deadline of 15 s to join", "",
     {"a": SERVE, "b": Role(roles.identify, (roles.SlowToArrive(LONG),))},
     {"join_deadline": 15}),
    ("a missed the deadline of 15 s to join", "in never",
     {"a": SERVE}, {"join_deadline": 15, "deadline": 60, "attach": roles.never_join}),
    ("b missed the run's deadline of 15 s", "in take_part",
     {"a": SERVE, "b": Role(time.sleep, (LONG,))}, {"deadline": 15}),
]  # fmt: skip


class TestFailure:
    @pytest.fixture(autouse=True)
    def nothing_left_behind(self, monkeypatch):
        before = {p.pid for p in workers_alive()}
        # What explains a lost peer is waited for, on however busy a machine.
        monkeypatch.setattr(group, "GRACE_LOST_PEER", PATIENCE)
        yield
        assert {p.pid for p in workers_alive()} == before

    @pytest.mark.parametrize("headline, more, system, options", FAILURES)
    def test_one_line_says_who_failed_and_why(self, headline, more, system, options):
        error = failure(system, **options)
        assert error.headline == headline
        assert more in error.details and "\\n" not in error.details
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.worker) == (str(error), headline.partition(" ")[0])

    def test_who_is_late_is_named(self):
        with ThreadPoolExecutor() as threads:  # which wait at the same time
            errors = threads.map(lambda late: failure(late[2], **late[3]), LATE)
        for error, (headline, more, *_) in zip(errors, LATE, strict=True):
            assert error.headline == headline and more in error.details
            assert type(error) is WorkerError  # not one that a new start may mend

    def test_an_error_here_ends_the_run_and_what_its_workers_started(self):
        children = []

        def on_report(_, pid):
            children.append(psutil.Process(pid))
            raise OSError

        with pytest.raises(OSError):
            launch({"worker": Role(roles.start_child_and_sleep)}, on_report=on_report)
        gone, _ = psutil.wait_procs(children, timeout=PATIENCE)
        assert gone == children


@pytest.mark.parametrize("kind", [group._RAISED, group._SILENT, group._LOST_PEER])
def test_a_failure_is_reported_after_one_more_look_for_what_explains_it(
    monkeypatch, kind
):
    run = group.Group(None, {}, None)
    run._fail(kind, "a", "raised ValueError")
    dies = partial(run._fail, group._DIED, "b", "was killed")
    monkeypatch.setattr(run, "_take_messages", lambda timeout: dies())
    assert run._cause().headline == "b was killed"


def test_a_lost_peer_is_what_one_s_own_connection_says_and_not_a_callee_s():
    gone = RuntimeError("Connection closed by peer")
    assert has_lost_peer(gone)
    # As torch raises it on the caller.
    assert not has_lost_peer(RuntimeError(f"On WorkerInfo(id=1, name=b):\n{gone!r}"))


def test_what_starts_workers_says_why_it_can_not(monkeypatch, capfd):
    """And not that they were killed."""
    monkeypatch.setenv("PYTHONWARNINGS", "error")  # and torch's imports warn
    end_server()
    assert failure({"a": SERVE}).headline.startswith("a could not be started")
    end_server()
    assert "Warning: " in capfd.readouterr().err


SCRIPT = f"""
import roles, time
from cdopt_tutorial.run import Role, group, launch
from running import preload_little
preload_little()
group.STOPPED = {LONG}  # or it would end the run
named = {{
    "waits": Role(roles.start_child_and_sleep),
    "busy": Role(time.sleep, ({LONG},)),
    "stopped": Role(roles.send_self, ("SIGSTOP",)),
    "deaf": Role(roles.hold_the_interpreter),
}}
launch(named, on_report=lambda _, pid: print(pid, flush=True))
"""


def test_workers_go_with_a_killed_parent(tmp_path):
    """All workers, their server and the files of the run, with no help from it."""

    def all_run():
        stopped = process.named().get("stopped")
        return stopped and stopped.status() == psutil.STATUS_STOPPED

    with Script(SCRIPT, tmp_path) as process:
        process.stdout.readline()  # so that child is there
        wait_until(all_run)
        # The tracker of multiprocessing is Python's own.
        below = process.below()
        below = [each for each in below if "tracker" not in str(each.cmdline())]
        psutil.Process(process.named()["waits"].ppid()).suspend()
        assert len(below) == 6 and [*tmp_path.glob("*/*/waits.log")]
        process.kill()
    try:
        wait_for_end(below)
        assert not [*tmp_path.glob("cdopt*")]
    finally:
        for each in below:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def test_workers_listen_on_loopback_only(tmp_path):
    # Whatever the environment and the host name suggest.
    others = set(psutil.net_if_addrs()) - {"lo"}
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


# What launches: where a supervisor ignores its children; in threads; in a child, after
# its parent has; in a folder to which it has moved; as it ends. Calls are answered with
# one thread, which this environment does not ask for.
ODDLY = """
import atexit, os, signal, sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from torch.distributed.rpc import rpc_sync
from cdopt_tutorial.run import Role, launch, serve
from roles import threads_of_a_product
from running import preload_little
preload_little()
del os.environ["OMP_NUM_THREADS"]

def run(function=threads_of_a_product):
    found = launch({"a": Role(rpc_sync, ("b", function)), "b": Role(serve)})
    print("good" if found == {"a": 0, "b": None} else found, flush=True)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
with ThreadPoolExecutor(4) as threads:
    [*threads.map(run, 5 * [threads_of_a_product])]
if (child := os.fork()) == 0:
    run()
    sys.exit()
with suppress(ChildProcessError):
    os.waitpid(child, 0)
os.chdir(os.environ["TMPDIR"])
import own_module
run(own_module.answer)
atexit.register(run, own_module.answer)
"""


def test_a_process_launches_whatever_it_is(tmp_path):
    (place := tmp_path / "a#b?c%23").mkdir()
    (place / "own_module.py").write_text("def answer(): return 0\n")
    with Script(ODDLY, place) as process:
        output, errors = process.communicate(timeout=PATIENCE)
    # Two threads may print into each other's lines.
    assert (output.replace("\n", ""), errors) == (8 * "good", "")
    assert [path.name for path in tmp_path.iterdir()] == [place.name]
    assert not [*place.glob("cdopt*")]
