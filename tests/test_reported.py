"""What users of launchers, calls and gradients across workers report as broken."""

import importlib.util
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import reported_roles
import roles
import torch
from hosts import PATIENCE
from running import Script

from cdopt_tutorial.calls import alone, gradients
from cdopt_tutorial.calls.rendezvous import Rendezvous
from cdopt_tutorial.run import Role, Trace, WorkerError, forking, launch, serve
from cdopt_tutorial.run.launch import LONGEST

pytestmark = pytest.mark.usefixtures("limited")

ray = [
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]
#: How calls travel, and what is attached to the workers.
CUT = pytest.param("rpc", gradients.cut_always, id="cut")
RAY = pytest.param("ray", None, id="Ray", marks=ray)
WAYS = [pytest.param("rpc", None, id="distributed"), CUT, RAY]


def played(function, *args, **options):
    """What a role returns that has two workers beside it."""
    system = {"a": Role(function, args), "b": Role(serve), "c": Role(serve)}
    return launch(system, **options)["a"]


class TestGradients:
    @pytest.mark.parametrize("on, attach", WAYS)
    def test_of_every_step_are_those_of_one_process(self, on, attach):
        """With calls within calls, results that the loss does not use, and no_grad."""
        found = played(reported_roles.take_all, on=on, attach=attach)
        with alone():
            assert found == reported_roles.take_all()
        assert found[0] == (8, 4, 2)  # of 2 x + 3 (2 x)

    @pytest.mark.parametrize("on, attach", [CUT, RAY])
    def test_of_steps_that_are_skipped_or_fail_nothing_is_kept(self, on, attach):
        skip = reported_roles.skip_steps
        assert played(skip, on=on, attach=attach, deadline=PATIENCE) == (8, 4, 2)

    def test_what_could_not_be_right_is_refused(self):
        """And neither waits for ever nor has no gradient."""
        outside, in_thread, inside, again, *failed = played(reported_roles.misuse)
        assert "a call with a gradient needs a context" in outside
        assert in_thread == outside
        assert "Already have an autograd context id for this thread" in inside
        assert "a context is for one backward pass" in again
        for said in failed:  # of the second one only the callee knows
            assert "a call of this context has failed" in said

    def test_a_context_within_one_is_refused_where_graphs_are_cut(self):
        said = played(reported_roles.nest, attach=gradients.cut_always)
        assert said == "this thread is in a context of gradients already"


class TestCalls:
    @pytest.mark.parametrize("on", ["rpc", pytest.param("ray", marks=ray)])
    def test_raise_what_the_callee_raised_if_that_can_be_sent(self, on):
        no_result = {"rpc": "RuntimeError", "ray": "TypeError"}[on]
        kinds = "Own", "WorkerError", "WorkerError", "UnicodeDecodeError", no_result
        codes = 7, *(None,) * 4
        expected = [(*of, "b") for of in zip(kinds, codes, strict=True) for _ in "12"]
        assert played(reported_roles.catch, "b", on=on) == expected

    @pytest.mark.parametrize("on", ["rpc", pytest.param("ray", marks=ray)])
    def test_have_a_time_out_at_once_or_later(self, on):
        found = played(reported_roles.wait_in_vain, "b", on=on)
        assert found == [("WorkerSilent", silent) for silent in "bbc"]

    def test_of_plain_functions_are_traced_too(self):
        found = played(reported_roles.call_a_function, trace=(trace := Trace()))
        assert found == (os.getcwd(), 1)
        assert [call.method for call in trace.calls] == ["getcwd", "abs"]

    @pytest.mark.parametrize("answers", [{1: "one"}, None], ids=["one", "none"])
    def test_that_meet_are_all_told_if_some_have_no_answer(self, answers):
        met = Rendezvous(lambda brought: answers, (1, 2))
        for future in [met.enter(1), met.enter(2)]:
            with pytest.raises((KeyError, TypeError)):
                future.wait()


class TestWorker:
    def test_has_the_state_of_the_process_that_launches(self, monkeypatch, tmp_path):
        """Not that at the start of what starts it."""
        before = os.sched_getaffinity(0)
        for number, mask in ("0", before), ("1", {min(before)}):
            (folder := tmp_path / number).mkdir()
            monkeypatch.chdir(folder)
            monkeypatch.setenv("OF_A_TEST", number)
            os.sched_setaffinity(0, mask)
            try:
                expected = number, mask, str(folder)
                assert launch({"a": Role(reported_roles.state)}) == {"a": expected}
            finally:
                os.sched_setaffinity(0, before)

    def test_starts_processes_and_runs_as_any_other_does(self):
        assert launch({"a": Role(reported_roles.load)}) == {"a": 28.0}
        folder = launch({"a": Role(reported_roles.launch_inside)})["a"]
        assert not Path(folder).exists()

    def test_writes_as_to_any_text_file(self, capsys):
        launch({"a": Role(reported_roles.write_in_every_way)})
        said = capsys.readouterr().out.splitlines()
        assert sorted(said) == ["[a] bytes", "[a] descriptor"]

    @pytest.mark.parametrize(
        "name", ["uint16", "uint32", "uint64", "complex32", "float8_e5m2", "half"]
    )
    def test_returns_tensors_of_any_dtype(self, name):
        tensor = torch.arange(2).view(getattr(torch, name))
        found = launch({"a": Role(roles.same, (tensor,))})["a"]
        assert found.dtype == tensor.dtype
        assert torch.equal(found.view(torch.int64), torch.arange(2))

    @pytest.mark.parametrize(
        "role, headline, details",
        [
            (Role(sys.exit), "exited with code 0", ""),
            (Role(sys.exit, (True,)), "exited with code 1", ""),
            (Role(sys.exit, ("disk is full",)), "exited with code 1", "disk is full"),
            (Role(reported_roles.end_by, (40,)), "was killed by signal 40", ""),
        ],
    )
    def test_is_named_with_what_ended_it(self, role, headline, details):
        with pytest.raises(WorkerError, match=f"^a {headline}") as caught:
            launch({"a": role, "b": Role(serve)})
        assert details in caught.value.details

    def test_may_take_for_ever_and_no_number_turns_into_another(self):
        endless = {"deadline": math.inf, "join_deadline": 1e12}
        for rpc_timeout in 0, LONGEST:
            options = endless | {"rpc_timeout": rpc_timeout}
            assert played(abs, -1, **options) == 1


class TestProcess:
    """What launches a run, and what that must not depend on."""

    #: Code that goes before a run.
    ODD = {
        "no children reported": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        "a debugger": "del sys.modules['__main__'].__spec__",
        "a folder of its own": "os.chdir(os.environ['TMPDIR']); import own_module",
        "at exit": "run, now = lambda: atexit.register(now), run",
        "forked": "run, now = lambda: in_child(os.fork(), now), run; run()",
        "a Pool's worker": "run, now = lambda: in_daemon(now), run",
        "threads": "run, now = lambda: [*Threads(4).map(now, range(8))], run",
    }
    SCRIPT = """
import atexit, os, signal, sys
from concurrent.futures import ThreadPoolExecutor as Threads
from multiprocessing import get_context
from cdopt_tutorial.run import Role, launch, serve
from running import preload_little
preload_little()

def run(*_):
    own = sys.modules.get("own_module")
    roles = {{"a": Role(own.answer if own else abs, (-7,)), "b": Role(serve)}}
    assert launch(roles) == {{"a": 7, "b": None}}
    print("good", flush=True)

def in_child(pid, do):
    if pid:
        assert os.waitpid(pid, 0)[1] == 0
    do()

def in_daemon(do):
    child = get_context("fork").Process(target=do, daemon=True)
    child.start()
    child.join()

{odd}
run()
"""

    @pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
    def test_launches_whatever_it_is(self, odd, tmp_path):
        (place := tmp_path / "a#b?c%23").mkdir()
        (place / "own_module.py").write_text("answer = lambda x: -x\n")
        with Script(self.SCRIPT.format(odd=odd), place) as process:
            output, errors = process.communicate(timeout=PATIENCE)
        assert set(output.split()) == {"good"} and not errors
        assert [each.name for each in tmp_path.iterdir()] == [place.name]
        assert not [*place.glob("cdopt*")]

    @pytest.mark.parametrize("how", ["cProfile -o /dev/null", "pdb -c continue"])
    def test_launches_what_another_program_runs(self, how, tmp_path):
        (script := tmp_path / "script.py").write_text(
            """
import sys
from cdopt_tutorial.calls import remote
from cdopt_tutorial.run import Role, launch, serve

times = 2

class Owned:
    def double(self, x):
        return double(x)

def double(x):
    return times * x

def ask():
    global times
    times = 3
    return remote("b", Owned).rpc_sync().double(4), double(4)

print(launch({"a": Role(ask), "b": Role(serve)}))
"""
        )
        command = [sys.executable, "-m", *how.split(), script]
        done = subprocess.run(command, input="q\n", capture_output=True, text=True)
        assert "{'a': (8, 12), 'b': None}" in done.stdout, done.stderr

    def test_is_told_of_a_module_that_only_it_has(self, tmp_path, no_process_starts):
        (tmp_path / "plugin.py").write_text("def f(): pass\n")
        spec = importlib.util.spec_from_file_location("plugin", tmp_path / "plugin.py")
        module = sys.modules["plugin"] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
            refused = "a: f is defined in module plugin, where a worker process can't"
            with pytest.raises(ValueError, match=refused):
                launch({"a": Role(module.f), "b": Role(serve)})
        finally:
            del sys.modules["plugin"]

    def test_is_told_that_its_folder_is_gone(self, tmp_path, monkeypatch):
        (folder := tmp_path / "gone").mkdir()
        monkeypatch.chdir(folder)
        folder.rmdir()
        with pytest.raises(OSError, match=f"the working folder is gone: {folder}$"):
            launch({"a": Role(serve)})

    def test_is_told_that_what_starts_workers_can_not(self, monkeypatch, capfd):
        """And not that they were killed."""
        monkeypatch.setenv("PYTHONWARNINGS", "error")  # and torch's imports warn
        forking.end_server()
        with pytest.raises(WorkerError, match="^a could not be started: what starts"):
            launch({"a": Role(serve)})
        forking.end_server()
        assert "Warning: " in capfd.readouterr().err

    @pytest.mark.parametrize("on", [pytest.param("ray", marks=ray)])
    def test_may_itself_be_a_job_of_ray(self, on, monkeypatch):
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
        monkeypatch.setenv("RAY_NAMESPACE", "elsewhere")
        assert played(abs, -1, on=on) == 1
