"""The launcher: what comes back, what is refused, and what a failure looks like."""

import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import rnn_roles
import roles
import torch
import torch.distributed.rpc as rpc
from running import listeners, wait_for_end

from cdopt_tutorial.engines import Role, WorkerError, launch, serve
from cdopt_tutorial.engines.launcher import forking, pack
from cdopt_tutorial.engines.launcher.process import LOOPBACK
from cdopt_tutorial.engines.watch.errors import origin

LONG = 300  # seconds; nothing that takes so long may be waited for


def workers_alive():
    """Processes forked for workers of this test process, zombies included."""
    return [p for p in psutil.Process().children(recursive=True) if p.name() != "sleep"]


@pytest.fixture(scope="module", autouse=True)
def fork_server():
    launch({"warm": Role(serve)})  # it stays, and is not counted


@pytest.fixture(autouse=True)
def nothing_left_behind(fork_server):
    before = {p.pid for p in workers_alive()}
    yield
    assert {p.pid for p in workers_alive()} == before


@contextmanager
def within(seconds):
    """Fails a test that would hang in the launcher itself."""

    def ring(*_):
        raise AssertionError(f"hung for {seconds} s")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    yield
    signal.alarm(0)


def calling(worker, function, *args, **kwargs):
    """A role that is one call."""
    return Role(rpc.rpc_sync, (worker, function, args, kwargs))


def failure(roles_, **options):
    with pytest.raises(WorkerError) as caught:
        launch(roles_, **options)
    return caught.value


class TestResults:
    def test_each_role_gets_its_name_its_rank_and_its_arguments(self):
        # With other sizes and ranks, one run after another.
        for names in ("ab", "cba", "b"):
            results = launch(
                {name: Role(roles.identify, (1,), {"two": 2}) for name in names}
            )
            of_ranks = {
                name: (name, i, (1,), {"two": 2}) for i, name in enumerate(names)
            }
            assert results == of_ranks

    def test_tensors_come_back_by_value(self):
        result = launch(
            {"worker": Role(torch.arange, (100_000.0,)), "idle": Role(serve)}
        )
        assert torch.equal(result["worker"], torch.arange(100_000.0))
        assert result["idle"] is None

    def test_a_worker_that_is_done_ends_by_itself(self, tmp_path):
        launch({"worker": Role(roles.write_as_it_ends, (tmp_path / "file",))})
        assert (tmp_path / "file").exists()  # so it was not killed

    def test_records_arrive_in_order_and_nobody_else_reads_the_runs_folder(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        records, modes = [], set()

        def on_report(*record):
            records.append(record)
            modes.update(f.stat().st_mode & 0o777 for f in tmp_path.glob("cdopt-*"))

        launch({"worker": Role(roles.report_all, (range(50),))}, on_report=on_report)
        assert records == [("worker", number) for number in range(50)]
        assert modes == {0o700}
        assert not list(tmp_path.glob("cdopt-*"))

    def test_what_a_worker_prints_is_printed_under_its_name(self, capsys):
        half = calling("other", print, "half", end="")
        launch({"worker": Role(roles.speak), "caller": half, "other": Role(serve)})
        captured = capsys.readouterr()
        assert sorted(captured.out.splitlines()) == [
            "[other] half", "[worker] to be heard"
        ]  # fmt: skip
        assert "[worker]" in captured.err
        assert "to be heeded" in captured.err

    def test_the_last_line_is_printed_even_if_it_does_not_end(self, capsys):
        with pytest.raises(WorkerError, match="^agent raised ArithmeticError"):
            launch({"agent": Role(roles.speak_half)})
        assert capsys.readouterr().out == "[agent] half a line\n"
        launch({"agent": Role(print, ("half",), {"end": ""})})
        assert capsys.readouterr().out == "[agent] half\n"

    def test_nothing_is_said_that_a_role_did_not_say(self, capfd):
        launch({"agent": Role(roles.converse, ("other", 2)), "other": Role(serve)})
        assert capfd.readouterr() == ("", "")

    def test_every_worker_has_imported_what_any_role_needs(self):
        # Otherwise the threads that answer calls would import it, two at a time.
        asks = Role(roles.ask_for_module, ("idle", rnn_roles.number_kept))
        assert launch({"agent": asks, "idle": Role(serve)})["agent"] is True


@pytest.mark.usefixtures("no_process_starts")
class TestRefusal:
    @pytest.mark.parametrize("name", ["", "with space", "a/b", "ä"])
    def test_a_name_that_rpc_does_not_allow(self, name):
        with pytest.raises(ValueError, match="can't name a worker"):
            launch({name: Role(serve)})

    def test_no_roles_and_no_threads(self):
        with pytest.raises(ValueError, match="at least one"):
            launch({})
        with pytest.raises(ValueError, match="num_threads is 0, but must be above 0"):
            launch({"worker": Role(serve, num_threads=0)})

    @pytest.mark.parametrize(
        ("option", "values", "allowed"),
        [
            ("deadline", [0, -1, math.nan], "above 0"),
            ("join_deadline", [0], "above 0"),
            ("rpc_timeout", [-1, math.nan, math.inf], "at least 0 and finite"),
            ("rpc_threads", [0, 0.5, 10**6], "a whole number from 1 to 256"),
        ],
    )
    def test_a_number_out_of_range(self, option, values, allowed):
        for value in values:
            refused = f"^{option} is {value}, but must be {allowed}"
            with pytest.raises(ValueError, match=refused):
                launch({"worker": Role(serve)}, **{option: value})

    @pytest.mark.parametrize(
        "value", [open(os.devnull), threading.Lock(), (n for n in "ab")]
    )
    def test_what_does_not_pickle(self, value):
        for role in (Role(roles.identify, (value,)), Role(lambda: value)):
            with pytest.raises(ValueError, match="^worker: .*cannot pickle") as caught:
                launch({"idle": Role(serve), "worker": role})
            assert "\n" not in str(caught.value)

    def test_a_module_without_a_file(self, monkeypatch):
        module = type(sys)("made_on_the_fly")
        exec("def f(): pass", module.__dict__)
        monkeypatch.setitem(sys.modules, "made_on_the_fly", module)
        for role in (module.f, lambda: module):
            with pytest.raises(ValueError, match="defined in module made_on_the_fly"):
                pack.pack({"worker": role})

    def test_what_is_sent_is_not_run_here(self):
        made = []
        pack.pack({"worker": Made(made)})
        assert made == []


class Made:
    """Made anew where it is unpickled, and notes that."""

    def __init__(self, made):
        self._made = made

    def __reduce__(self):
        return self._made.append, (1,)


class TestFailure:
    def test_an_exception_names_the_worker_and_carries_its_traceback(self):
        error = failure({"agent": Role(serve), "observer0": Role(roles.raise_error)})
        assert error.worker == "observer0"
        assert error.headline == "observer0 raised ArithmeticError"
        assert "in raise_error" in error.details
        assert "seven times six" in str(error)
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.worker) == (str(error), "observer0")

    def test_one_that_is_killed_as_it_starts_is_named(self, monkeypatch):
        def start(process):  # as multiprocessing's, where the worker is gone at once
            raise EOFError

        monkeypatch.setattr(forking.CONTEXT.Process, "start", start)
        error = failure({"agent": Role(serve), "observer0": Role(serve)})
        assert error.headline == "agent was killed as it started"

    @pytest.mark.parametrize(
        ("method", "kind"),
        [("fail", "KeyError"), ("fail_oddly", "TwoArguments")],
    )
    def test_an_exception_in_a_call_names_the_callee(self, method, kind):
        args = ("observer0", method, *([kind] if method == "fail" else []))
        error = failure({"agent": Role(roles.call, args), "observer0": Role(serve)})
        assert error.headline == f"observer0 raised {kind} in a call that agent made"
        assert f"in {method}" in error.details
        assert "Called by agent" in error.details
        assert "\\n" not in error.details

    def test_an_exception_two_workers_away_names_the_last(self):
        passed_on = calling("b", roles.call, "c", "fail", "ValueError")
        error = failure({"a": passed_on, "b": Role(serve), "c": Role(serve)})
        assert error.headline == "c raised ValueError in a call that a made"
        assert origin("just a text") is None

    @pytest.mark.parametrize(
        ("number", "polling", "reason"),
        [
            ("SIGKILL", False, "was killed by SIGKILL"),
            ("SIGSEGV", True, "was killed by SIGSEGV"),
            ("SIGSTOP", False, "was stopped (SIGSTOP) and did not go on"),
        ],
    )
    def test_who_is_killed_or_stopped_is_named_not_who_waits_for_it(
        self, number, polling, reason
    ):
        waiting = calling("observer0", time.sleep, LONG)
        sent = Role(roles.send_self, (number,))
        error = failure({"agent": waiting, "observer0": sent}, polling=polling)
        assert error.headline == f"observer0 {reason}"

    @pytest.mark.parametrize(("leave", "code"), [(os._exit, 0), (sys.exit, 4)])
    def test_an_early_exit(self, leave, code):
        error = failure({"a": Role(leave, (code,)), "b": Role(serve)})
        assert error.headline == f"a exited with code {code} before it finished"

    @pytest.mark.parametrize(
        ("number", "reason"), [("SIGKILL", "killed"), ("SIGSTOP", "stopped")]
    )
    def test_a_worker_that_ends_as_it_starts(self, number, reason):
        # Its role takes long to read, so it is caught before it has done so.
        before = set(workers_alive())

        def catch():
            while not (born := set(workers_alive()) - before):
                time.sleep(0.001)
            born.pop().send_signal(getattr(signal, number))

        role = Role(roles.identify, (bytes(30_000_000),))
        with within(30):
            threading.Thread(target=catch).start()
            assert failure({"late": role}).headline.startswith(f"late was {reason}")

    def test_a_worker_that_is_stopped_in_the_middle_of_a_message(self):
        with within(30):
            error = failure({"worker": Role(roles.stop_in_a_message, (1_000_000,))})
        assert error.headline.startswith("worker was stopped")

    def test_a_stopped_worker_is_named_not_who_lost_it(self):
        # Whoever lost it says so before it has been stopped for long enough to count.
        lost = Role(roles.lose_peer)
        stopped = Role(roles.send_self, ("SIGSTOP",))
        error = failure({"agent": lost, "observer0": stopped})
        assert error.headline.startswith("observer0 was stopped")

    def test_a_worker_that_never_joins(self):
        late = Role(roles.identify, (roles.SlowToArrive(LONG),))
        error = failure({"a": Role(serve), "late": late}, join_deadline=2)
        assert error.headline == "late missed the deadline of 2 s to join"

    def test_the_deadline_of_the_run(self):
        error = failure({"a": Role(serve), "b": Role(roles.sleep, (LONG,))}, deadline=2)
        assert error.headline == "b missed the run's deadline of 2 s"
        assert "in sleep" in error.details  # where it was

    def test_the_deadline_of_a_run_of_which_a_call_is_all_that_is_left(self):
        caller = Role(roles.leave_call, ("b", LONG))
        error = failure({"a": caller, "b": Role(serve)}, deadline=6)
        assert error.headline == "a missed the run's deadline of 6 s (and b)"

    @pytest.mark.parametrize(
        ("role", "reason"),
        [
            (roles.give_unreadable, "returned what can't be unpickled"),
            (roles.report_unreadable, "reported what can't be unpickled"),
            (roles.raise_silent, "raised Silent"),
            (roles.raise_odd_error, "raised TwoArguments"),
            (threading.Lock, "raised TypeError"),  # can't be pickled, as a result
        ],
    )
    def test_what_a_worker_sends_and_nobody_can_read(self, role, reason):
        error = failure({"idle": Role(serve), "worker": Role(role)})
        assert error.headline == f"worker {reason}"
        assert reason.startswith("raised") or "no number" in error.details

    @pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
    def test_an_error_here_ends_the_run_and_what_its_workers_started(self, error):
        children = []

        def on_report(_, pid):
            children.append(psutil.Process(pid))
            raise error

        with pytest.raises(error):
            launch({"worker": Role(roles.start_child_and_sleep)}, on_report=on_report)
        gone, _ = psutil.wait_procs(children, timeout=10)
        assert gone == children


class TestPace:
    """Who works in step with others, and gets no further, is named."""

    def system(self, b):
        return {
            "a": Role(roles.keep_pace, (0, 0.5, 0)),
            "b": Role(roles.keep_pace, b),
            "server": Role(serve),
        }

    @pytest.mark.parametrize(
        ("attach", "late"),
        [(roles.place_steps, "b"), (roles.place_steps_at_server, "server")],
    )
    def test_who_is_furthest_behind_or_whom_it_waits_for_is_named(self, attach, late):
        error = failure(self.system((0, LONG, 0)), attach=attach)
        missed = "missed its deadline of 2 s for its part of a step"
        assert error.headline == f"{late} {missed}"
        assert late == "server" or "in one_step" in error.details  # where it was

    def test_after_a_step_it_waits_for_nobody(self):
        dawdles = {"b": Role(roles.dawdle, (LONG,))}
        error = failure(self.system(()) | dawdles, attach=roles.place_steps_at_server)
        assert error.worker == "b"

    def test_nobody_who_keeps_pace_is(self):
        # Each step has two seconds, and all of them together take longer.
        system = self.system((1.2, 0, 1.2))
        assert launch(system, attach=roles.place_steps)["b"] is None

    def test_after_the_last_step_there_is_time(self):
        role = {"a": Role(roles.dawdle, (1,))}
        assert launch(role, attach=roles.place_last_step) == {"a": None}


class TestParent:
    SCRIPT = """
import roles
from cdopt_tutorial.engines import Role, launch
from running import preload_little
preload_little()
named = {{name: (getattr(roles, role), args) for name, role, args in {roles}}}
launch(
    {{name: Role(*each) for name, each in named.items()}},
    on_report=lambda _, pid: print(pid, flush=True),
)
"""

    @contextmanager
    def start(self, *roles, **env):
        """The parent, and all processes below it when the first worker reported."""
        with subprocess.Popen(
            [sys.executable, "-c", self.SCRIPT.format(roles=roles)],
            env=os.environ | env, cwd=Path(__file__).parent,
            stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            first = int(process.stdout.readline())
            time.sleep(0.5)  # until the others have begun, too
            children = psutil.Process(process.pid).children(recursive=True)
            assert first in {child.pid for child in children}
            yield process, children
            process.kill()

    def test_workers_go_with_a_killed_parent(self):
        with self.start(
            ("waits", "report_and_sleep", (LONG,)),
            ("busy", "sleep", (LONG,)),
            ("stopped", "send_self", ("SIGSTOP",)),
            ("deaf", "hold_the_interpreter", ()),
        ) as (_, children):
            assert len(children) >= 5  # four workers and their server
        try:
            wait_for_end(children, seconds=2)
        finally:
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()

    def test_workers_listen_on_loopback_only(self):
        # Whatever the environment or the name of the host would have them take.
        others = set(psutil.net_if_addrs()) - {LOOPBACK}
        other = min(others, default="none0")
        both = [(str(rank), "meet_and_sleep", (rank, LONG)) for rank in range(2)]
        names = dict.fromkeys(("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), other)
        with self.start(*both, **names) as (_, children):
            listening = [listeners(child.pid)[0] for child in children]
        assert sum(map(bool, listening)) == 2  # the workers, and not their server
        assert {ip for each in listening for ip, _ in each} <= {"127.0.0.1", "::1"}
