"""The launcher: what comes back, what is refused, and what a failure looks like."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import rnn_roles
import roles
import torch
from running import listeners, wait_for_end

from cdopt_tutorial.engines import Role, WorkerError, forking, launch, pack, serve
from cdopt_tutorial.engines.errors import origin
from cdopt_tutorial.engines.process import LOOPBACK

LONG = 300  # seconds; nothing that takes so long may be waited for


def workers_alive():
    """Processes forked for workers of this test process, zombies included."""
    return [p for p in psutil.Process().children(recursive=True) if p.name() != "sleep"]


@pytest.fixture(autouse=True)
def nothing_left_behind():
    launch({"warm": Role(serve)})  # the fork server stays, and is not counted
    before = {p.pid for p in workers_alive()}
    yield
    assert {p.pid for p in workers_alive()} == before


class Guard:
    """Fails a test that would hang in the launcher itself."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __enter__(self):
        signal.signal(signal.SIGALRM, self.ring)
        signal.alarm(self.seconds)

    def __exit__(self, *_):
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def ring(self, *_):
        raise AssertionError(f"hung for {self.seconds} s")


def failure(roles_, **options):
    with pytest.raises(WorkerError) as caught:
        launch(roles_, **options)
    return caught.value


class TestResults:
    def test_each_role_gets_its_name_its_rank_and_its_arguments(self):
        results = launch(
            {
                "agent": Role(roles.identify, (1, "two"), {"three": 3}),
                "observer0": Role(roles.identify),
                "idle": Role(serve),
            }
        )
        assert results == {
            "agent": ("agent", 0, (1, "two"), {"three": 3}),
            "observer0": ("observer0", 1, (), {}),
            "idle": None,
        }

    def test_tensors_come_back_by_value(self):
        result = launch({"worker": Role(roles.give_tensor, (100_000,))})["worker"]
        assert torch.equal(result, torch.arange(100_000.0))

    def test_runs_follow_each_other_with_other_sizes_and_ranks(self):
        for names in ("ab", "cba", "b"):
            results = launch({name: Role(roles.identify) for name in names})
            assert [results[name][1] for name in names] == list(range(len(names)))

    def test_a_worker_that_is_done_ends_by_itself(self, tmp_path):
        launch({"worker": Role(roles.write_as_it_ends, (tmp_path / "file",))})
        assert (tmp_path / "file").exists()  # so it was not killed

    def test_records_arrive_in_order_while_the_role_runs(self):
        records = []
        launch(
            {"worker": Role(roles.report_all, (list(range(50)),))},
            on_report=lambda *record: records.append(record),
        )
        assert records == [("worker", number) for number in range(50)]

    def test_what_a_worker_prints_is_printed_under_its_name(self, capsys):
        launch({"worker": Role(roles.speak)})
        captured = capsys.readouterr()
        assert captured.out == "[worker] to be heard\n"
        assert "[worker]" in captured.err
        assert "to be heeded" in captured.err

    def test_the_last_line_is_printed_even_if_it_does_not_end(self, capsys):
        with pytest.raises(WorkerError, match="^agent raised ArithmeticError"):
            launch({"agent": Role(roles.speak_half)})
        assert capsys.readouterr().out == "[agent] half a line\n"
        launch({"agent": Role(print, ("half",), {"end": ""})})
        assert capsys.readouterr().out == "[agent] half\n"

    def test_so_is_that_of_a_call(self, capsys):
        call = Role(roles.print_at, ("other", "half"))
        launch({"agent": call, "other": Role(serve)})
        assert capsys.readouterr().out == "[other] half\n"

    def test_nothing_is_said_that_a_role_did_not_say(self, capfd):
        launch({"agent": Role(roles.converse, ("other", 2)), "other": Role(serve)})
        assert capfd.readouterr() == ("", "")

    def test_every_worker_has_imported_what_any_role_needs(self):
        # Otherwise the threads that answer calls would import it, two at a time.
        results = launch(
            {
                "agent": Role(roles.ask_for_module, ("idle", rnn_roles.number_kept)),
                "idle": Role(serve),
            }
        )
        assert results["agent"] is True


@pytest.mark.usefixtures("no_process_starts")
class TestRefusal:
    @pytest.mark.parametrize("name", ["", "with space", "a/b", "ä"])
    def test_a_name_that_rpc_does_not_allow(self, name):
        with pytest.raises(ValueError, match="can't name a worker"):
            launch({name: Role(serve)})

    def test_no_roles(self):
        with pytest.raises(ValueError, match="at least one"):
            launch({})

    @pytest.mark.parametrize("option", ["deadline", "join_deadline"])
    def test_a_number_out_of_range(self, option):
        with pytest.raises(ValueError, match=f"{option} is 0, but must be above 0"):
            launch({"worker": Role(serve)}, **{option: 0})
        with pytest.raises(ValueError, match="num_threads is 0"):
            launch({"worker": Role(serve, num_threads=0)})

    @pytest.mark.parametrize("seconds", [-1, math.nan, math.inf])
    def test_no_time_that_torch_could_wait(self, seconds):
        told = f"rpc_timeout is {seconds}, but must be at least 0 and finite"
        with pytest.raises(ValueError, match=told):
            launch({"worker": Role(serve)}, rpc_timeout=seconds)

    @pytest.mark.parametrize("number", [0, 0.5, 10**6])
    def test_no_number_of_threads_that_a_worker_could_have(self, number):
        told = f"rpc_threads is {number}, but must be a whole number from 1 to 256"
        with pytest.raises(ValueError, match=told):
            launch({"worker": Role(serve)}, rpc_threads=number)

    @pytest.mark.parametrize(
        "value", [open(os.devnull), threading.Lock(), (n for n in "ab")]
    )
    def test_what_does_not_pickle(self, value):
        def inner():
            return value

        for role in (Role(roles.identify, (value,)), Role(inner), Role(lambda: value)):
            with pytest.raises(ValueError, match="^worker: .*cannot pickle") as caught:
                launch({"idle": Role(serve), "worker": role})
            assert "\n" not in str(caught.value)

    def test_a_module_without_a_file(self, monkeypatch):
        module = type(sys)("made_on_the_fly")
        exec("def f(): pass", module.__dict__)
        monkeypatch.setitem(sys.modules, "made_on_the_fly", module)
        with pytest.raises(ValueError, match="defined in module made_on_the_fly"):
            pack.pack({"worker": module.f})
        with pytest.raises(ValueError, match="defined in module made_on_the_fly"):
            pack.pack({"worker": lambda: module})


class TestFailure:
    def test_an_exception_names_the_worker_and_carries_its_traceback(self):
        error = failure({"agent": Role(serve), "observer0": Role(roles.raise_error)})
        assert error.worker == "observer0"
        assert error.headline == "observer0 raised ArithmeticError"
        assert "in raise_error" in error.details
        assert "seven times six" in str(error)

    def test_one_that_is_killed_as_it_starts_is_named(self, monkeypatch):
        def start(process):  # as multiprocessing's, where the worker is gone at once
            raise EOFError

        monkeypatch.setattr(forking.CONTEXT.Process, "start", start)
        error = failure({"agent": Role(serve), "observer0": Role(serve)})
        assert error.headline == "agent was killed as it started"

    def test_an_exception_that_does_not_pickle(self):
        error = failure({"worker": Role(roles.raise_odd_error)})
        assert error.headline == "worker raised TwoArguments"

    @pytest.mark.parametrize(
        ("method", "kind"),
        [("fail", "KeyError"), ("fail", "ValueError"), ("fail_oddly", "TwoArguments")],
    )
    def test_an_exception_in_a_call_names_the_callee(self, method, kind):
        args = ("observer0", method, *([kind] if method == "fail" else []))
        error = failure({"agent": Role(roles.call, args), "observer0": Role(serve)})
        assert error.headline == f"observer0 raised {kind} in a call that agent made"
        assert f"in {method}" in error.details
        assert "Called by agent" in error.details
        assert "\\n" not in error.details

    def test_an_exception_two_workers_away_names_the_last(self):
        error = failure(
            {"a": Role(roles.pass_on, ("b", "c")), "b": Role(serve), "c": Role(serve)}
        )
        assert error.headline == "c raised ValueError in a call that a made"

    @pytest.mark.parametrize("polling", [False, True])
    @pytest.mark.parametrize("number", ["SIGKILL", "SIGSEGV", "SIGTERM"])
    def test_a_killed_worker_is_named_not_the_one_that_waits_for_it(
        self, number, polling
    ):
        waiting = Role(roles.sleep_on, ("observer0", LONG))
        killed = Role(roles.send_self, (number,))
        error = failure({"agent": waiting, "observer0": killed}, polling=polling)
        assert error.headline == f"observer0 was killed by {number}"

    @pytest.mark.parametrize("code", [0, 3])
    def test_an_early_exit(self, code):
        error = failure(
            {"a": Role(roles.leave, (code,)), "b": Role(roles.sleep, (LONG,))}
        )
        assert error.headline == f"a exited with code {code} before it finished"

    @pytest.mark.parametrize(
        ("number", "told"), [("SIGKILL", "killed"), ("SIGSTOP", "stopped")]
    )
    def test_a_worker_that_ends_as_it_starts(self, number, told):
        # Its role takes long to read, so it is caught before it has done so.
        before = set(workers_alive())

        def catch():
            while not (born := set(workers_alive()) - before):
                time.sleep(0.001)
            born.pop().send_signal(getattr(signal, number))

        role = Role(roles.identify, (bytes(30_000_000),))
        with Guard(30):
            threading.Thread(target=catch).start()
            assert failure({"late": role}).headline.startswith(f"late was {told}")

    def test_a_worker_that_is_stopped_in_the_middle_of_a_message(self):
        with Guard(30):
            error = failure({"worker": Role(roles.stop_in_a_message, (1_000_000,))})
        assert error.headline.startswith("worker was stopped")

    def test_a_polite_exit(self):
        error = failure({"a": Role(roles.exit_politely), "b": Role(serve)})
        assert error.headline == "a exited with code 4 before it finished"

    @pytest.mark.parametrize("polling", [False, True])
    def test_a_stopped_worker(self, polling):
        waiting = Role(roles.sleep_on, ("observer0", LONG))
        stopped = Role(roles.send_self, ("SIGSTOP",))
        error = failure({"agent": waiting, "observer0": stopped}, polling=polling)
        assert error.headline.startswith("observer0 was stopped")

    def test_a_stopped_worker_is_named_not_who_lost_it(self):
        # Whoever lost it says so before it has been stopped for long enough to count.
        lost = Role(roles.lose_peer)
        stopped = Role(roles.send_self, ("SIGSTOP",))
        error = failure({"agent": lost, "observer0": stopped})
        assert error.headline.startswith("observer0 was stopped")

    def test_a_worker_that_never_joins(self):
        late = Role(roles.identify, (roles.SlowToArrive(LONG),))
        error = failure(
            {"a": Role(serve), "late": late, "b": Role(serve)}, join_deadline=2
        )
        assert error.headline == "late missed the deadline of 2 s to join"

    def test_the_deadline_of_the_run(self):
        error = failure({"a": Role(serve), "b": Role(roles.sleep, (LONG,))}, deadline=2)
        assert error.headline == "b missed the run's deadline of 2 s"
        assert "in sleep" in error.details  # where it was

    def test_the_deadline_of_a_run_of_which_a_call_is_all_that_is_left(self):
        caller = Role(roles.leave_call, ("b", LONG))
        error = failure({"a": caller, "b": Role(serve)}, deadline=6)
        assert error.headline == "a missed the run's deadline of 6 s (and b)"

    def test_a_result_that_does_not_pickle(self):
        error = failure({"worker": Role(roles.give_unpicklable)})
        assert error.worker == "worker"

    @pytest.mark.parametrize(
        ("role", "told"),
        [
            (roles.give_unreadable, "returned what can't be unpickled"),
            (roles.report_unreadable, "reported what can't be unpickled"),
            (roles.raise_silent, "raised Silent"),
        ],
    )
    def test_what_a_worker_sends_and_nobody_can_read(self, role, told):
        error = failure({"idle": Role(serve), "worker": Role(role)})
        assert error.headline == f"worker {told}"
        assert told.startswith("raised") or "no number" in error.details

    def test_an_error_in_the_parents_own_callback_ends_the_run(self):
        def on_report(*_):
            raise LookupError("mine")

        with pytest.raises(LookupError, match="mine"):
            launch(
                {"worker": Role(roles.report_and_sleep, (LONG,))}, on_report=on_report
            )

    def test_an_interrupt_ends_the_run(self):
        def on_report(*_):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            launch(
                {"worker": Role(roles.report_and_sleep, (LONG,))}, on_report=on_report
            )

    def test_what_a_worker_started_goes_with_it(self):
        children = []

        def on_report(_, pid):
            children.append(psutil.Process(pid))
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            launch({"worker": Role(roles.start_child_and_sleep)}, on_report=on_report)
        gone, _ = psutil.wait_procs(children, timeout=10)
        assert gone == children

    def test_the_error_survives_pickling(self):
        import pickle

        error = pickle.loads(pickle.dumps(WorkerError("a", "left", "here")))
        assert (error.worker, error.reason, error.details) == ("a", "left", "here")

    def test_a_local_exception_has_no_origin(self):
        assert origin("just a text") is None


class TestPace:
    """Who works in step with others, and gets no further, is named."""

    STALLED = "missed its deadline of 2 s for its part of a step"

    def system(self, *b):
        return {
            "a": Role(roles.keep_pace, (0, 0.5, 0)),
            "b": Role(roles.keep_pace, b),
            "server": Role(serve),
        }

    def test_who_is_furthest_behind_and_late_is_named(self):
        error = failure(self.system(0, LONG, 0), attach=roles.place_steps)
        assert error.headline == f"b {self.STALLED}"
        assert "in one_step" in error.details  # where it was

    def test_whom_it_waits_for_is_named_in_its_place(self):
        error = failure(self.system(0, LONG, 0), attach=roles.place_steps_at_server)
        assert error.headline == f"server {self.STALLED}"

    def test_after_a_step_it_waits_for_nobody(self):
        error = failure(
            self.system() | {"b": Role(roles.dawdle, (LONG,))},
            attach=roles.place_steps_at_server,
        )
        assert error.headline == f"b {self.STALLED}"

    def test_nobody_who_keeps_pace_is(self):
        # Each step has two seconds, and all of them together take longer.
        assert launch(self.system(1.2, 0, 1.2), attach=roles.place_steps)["b"] is None

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

    def start(self, *roles, **env):
        """The parent, and all processes below it when the first worker reported."""
        process = subprocess.Popen(
            [sys.executable, "-c", self.SCRIPT.format(roles=roles)],
            env=os.environ | env, cwd=Path(__file__).parent,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        first = int(process.stdout.readline())
        time.sleep(0.5)  # until the others have begun, too
        children = psutil.Process(process.pid).children(recursive=True)
        assert first in {child.pid for child in children}
        return process, children

    def test_workers_go_with_a_killed_parent(self):
        process, children = self.start(
            ("waits", "report_and_sleep", (LONG,)),
            ("busy", "sleep", (LONG,)),
            ("stopped", "send_self", ("SIGSTOP",)),
            ("deaf", "hold_the_interpreter", ()),
        )
        assert len(children) >= 5  # four workers and their server
        process.kill()
        process.wait()
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
        process, children = self.start(*both, **names)
        try:
            listening = [listeners(child.pid)[0] for child in children]
            assert sum(map(bool, listening)) == 2  # the workers, and not their server
            assert {ip for each in listening for ip, _ in each} <= {"127.0.0.1", "::1"}
        finally:
            process.kill()
            process.wait()

    def test_the_runs_folder_is_private_and_goes(self, tmp_path, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        modes = []

        def on_report(*_):
            modes.extend(
                folder.stat().st_mode & 0o777 for folder in tmp_path.glob("cdopt-*")
            )

        launch({"worker": Role(roles.report_all, ([1],))}, on_report=on_report)
        assert modes == [0o700]
        assert not list(tmp_path.glob("cdopt-*"))
