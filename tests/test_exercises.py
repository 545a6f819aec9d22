"""The checks of the exercises: solutions are right, and mistakes are named.

A wrong attempt is the published solution with an edit.
"""

import ast
import math
import os
import re
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from IPython.core.inputtransformer2 import TransformerManager

from cdopt_tutorial import exercises
from cdopt_tutorial.publish.chapter import code_cells, read_chapter, tagged
from cdopt_tutorial.publish.project import this_project


@dataclass
class Exercise:
    label: str
    attempt: str  #: an expression of what the solution has defined
    #: What is said of other expressions, or of the solution with one text replaced.
    wrong: dict[str | tuple[str, str], str]
    before: str = ""  #: what the solution needs of the chapter
    runs: bool = True  #: whether it runs, or only its definitions are made


TABLE = [
    Exercise("ex-death", "roles", {
        ("os._exit, (3,)", 'int, ("x",)'):
            "observer1 does not leave: observer1 raised ValueError",
        "roles | {'observer0': Role(os._exit, (3,)), 'observer1': Role(serve)}":
            "the error names 'observer0', and not 'observer1'",
    }),
    Exercise("ex-seed", "OneSeed", {
        ("seed_of(0,", "seed_of(observer,"):
            "observer1's seed for environments is 1189033389, and not 1835504127",
        ("seed_of(0,", "seed_of(observer * (purpose == 'actions'),"):
            "observer1's seed for actions is 1639030180, and not 1501029259",
    }, runs=False),
    Exercise("ex-dice", "master", {
        ("args=(i,)", "args=(0,)"):
            "the mean is 3.505, and not 3.50683: both dice have the seed 0",
        ("futures = [rref.rpc_async().roll(1000) for rref in dice]",
         "futures = [rpc.remote(w, Dice, args=(i,)).rpc_async().roll(1000)"
         " for i, w in enumerate(workers)]"):
            "the mean is 3.489, and not 3.50683: each round makes new dice",
        ("().roll", "().rol"):
            "master raised AttributeError: …'Dice' has no attribute 'rol'",
    }, runs=False),
    Exercise("ex-plain", "step_plainly", {
        ("        optimizer.step()", "        weight.grad = dist_autograd."
         "get_gradients(context_id)[weight]; optimizer.step()"):
            "the weight is -0.5, and not 1: the step used the gradient",
        ("dist_autograd.backward(context_id, [loss])", "loss.backward()"):
            "trainer0 raised RuntimeError: …INTERNAL ASSERT FAILED…",
    }, runs=False),
    Exercise("ex-line", "fit", {
        ("lr * gradients", "0 * gradients"): "the slope is …, and not 2",
        ('rpc.rpc_sync("ps", predict, (layer, x))', "predict(layer, x)"):
            "trainer0 raised RuntimeError: …can't call localValue() on user…",
        "lambda steps: (2.0, 1.0)": "in 60 steps there were only 0 calls to ps",
    }, runs=False),
    Exercise("ex-cut", "tuple(sent.values())", {
        "(sent['logits'] // 2, sent['loss'])":
            "with the cut at the scores the bytes are 29122800, and not 58245600: "
            "gradients cross, too",
        "(sent['logits'], sent['loss'] // 4)":
            "with the cut at the loss the bytes are 562800, and not 2251200: "
            "a number has 4 bytes",
        "(2 * 4 * 35 * 20 * 10_000, sent['loss'])":
            "with the cut at the scores the bytes are 56000000, and not 58245600: "
            "vectors and outputs cross, too",
    }),
    Exercise("ex-shortcut", "found[False]", {
        "str(found[True])": "there is no internal assertion in …",
        "'the context was not found'":
            "there is no internal assertion in 'the context was not found'",
    }, before="both = 'trainer0', 'trainer1'"),
    Exercise("ex-empty", "(uneven, here)", {
        ("(80, 1, 1)", "(1, 1, 1)"):
            "the number of trainers that had no images in some batch is 0, and not 2",
        ("run_locally(Job(small", "run_locally(Job(replace(small, seed=5)"):
            "the parameters are … off those of one process",
    }, before="digits, config, exact_steps = digit_bags(), HybridConfig(), 10\n"
       "same = {'dtype': 'float64', 'max_steps': 10, 'batch_size': 32}"),
    Exercise("ex-row", "train", {
        ("sum(found) / 2", "sum(found)"):
            "with labels [0, 0, 1] and [0] r ends at 0.5, and not 0.25: "
            "each gradient was applied whole",
        (" * len(labels) * 2 / 4", ""):
            "with labels [0, 0, 1] and [0] r ends at 0.333333, and not 0.25: "
            "each trainer's mean counts alike",
        ("    both.wait()", "    pass"):
            "with labels [0, 0, 1] and [0] r ends at 0, and not 0.25",
    }, before="both = 'trainer0', 'trainer1'", runs=False),
    Exercise("ex-eight-death", "leave", {
        ("_number == 1", "_number == 0"):
            "the run ended because observer0 exited with code 3 before it finished",
        ("_played == 2", "_played == 3"):
            "the rollouts before the last are 3, and not 2",
        ("os._exit(3)", "raise OSError"):
            "the run ended because observer1 raised OSError in a call that agent made",
    }, before="config = RolloutsConfig(num_observers=3, num_envs=4, max_lag=2, "
       "max_episodes=240)", runs=False),
    Exercise("ex-eight-server", "lead", {
        ("append((worker, version))", "append((worker, version + 1))"):
            "note 0 names version 1, not yet there",
        ("manual_seed(number)", "manual_seed(number + 1)"):
            "after the 14 gradients of the notes w is …, and not …",
        ("self.w - 0.05", "self.w + 0.05"):
            "after the 14 gradients of the notes w is …, and not …",
    }, runs=False),
    Exercise("ex-seven-kill", "([1, 1], 3)", {
        "([0, 1], 3)": "torchrun 0 ended well, and not with an error",
        "([1, 1], 6)": "the rounds in the agent's file are 6, and not 3",
    }, runs=False),  # the solution asserts these, and takes two torchruns
    Exercise("ex-seven-state", "before + anew", {
        "undisturbed":
            "in round 4 the numbers are [0.682614, …], and not [0.757632, …]: "
            "the old generator drew them",
        "draw(torch.Generator().manual_seed(2), 6)":
            "in round 0 the numbers are […], and not [0.757632, …]",
        "before": "the number of rounds is 4, and not 6",
    }),
    Exercise("ex-seven-sum", "trainer", {
        ('name="total"', 'name=f"total{rank}"'):
            "the trainer that finishes last gets 145, and not 190: "
            "each trainer has a total of its own",
        ("self.value += number", "self.value = number"):
            "the trainer that finishes last gets 19, and not 190",
    }, runs=False),
    Exercise("ex-lazy", "border", {
        "border / 2":
            "beta is 0.984375, and not 1.9667: the penalty lacks its factor 1/2",
        "2 * border": "beta is 3.9375, and not 1.9667: the penalty has a factor 1/4",
        "0.04": "beta is 0.04, and not 1.9667",
    }),
    Exercise("ex-formula", "2 * q", {
        "q": "X is only … off the manifold",
        "2 * torch.eye(3, 6)": "A(X) is 1.7 off the manifold",
        "10 * q": "A(X) is … off the manifold",
    }),
    Exercise("ex-own", "(layer.weight, layer.bias)", {
        ("square().sum(1, keepdim=True)", "square().sum(0, keepdim=True)"):
            "the norm of a row differs from 1 by …",
        ("2 * w / (1 + w.square().sum(1, keepdim=True))", "1 * w"):
            "the norm of a row differs from 1 by …",
        ("range(150)", "range(0)"): "only …% of the digits are right",
    }),
    Exercise("ex-weak", "(end.weight, end.mapped, loose.perplexity, "
             "loose.projected.score.perplexity)", {
        "(tight.feasibility[-1].weight, tight.feasibility[-1].mapped, 146.0, 198.0)":
            "A(W) is … off, and W farther, …",
        "(end.weight, end.mapped, loose.projected.score.perplexity, loose.perplexity)":
            "the perplexity of … falls to …",
    }, before="corpus = data.load_corpus(max_vocab=1000)\n"
       "stacked = RNNConfig(embedding=64, hidden=64, manifold='stiefel')"),
    Exercise("ex-stale", "(found[True][0], found[False][0])", {
        "(found[False][0], found[True][0])":
            "the staleness of those that wait is …, and not 0",
        "(0, 0.0)": "asynchronous trainers have no stale gradient",
    }, before="corpus = data.load_corpus(max_vocab=1000)\n"
       "decoder = RNNConfig(embedding=64, hidden=64, manifold='stiefel', "
       "where='server', penalty_param=10.0)"),
    Exercise("ex-own-server", "trainer", {
        ("            loss = loss + rpc.rpc_sync(\"ps\", penalty, (layer,))\n", ""):
            "A(W) is off by …, and not 0",
        (".weight.detach()", ".parametrizations.weight.original.detach()"):
            "A(W) is off by …, and not 0",
        ("range(30)", "range(29)"): "A(W) is off by …, and not 0",
        ("-= 0.1", "+= 0.1"): "A(W) is off by …, and not 0",
    }, runs=False),
    Exercise("ex-six-forget", "of_rows", {
        ("momentum.chunk(ranks)", "momentum.chunk(1)"):
            "with 2 ranks the update is off by …%",
        ("orthogonalised(part.T).T", "part / part.norm()"):
            "with 2 ranks the update is off by …%",
    }, before="a, b, c = NEWTON_SCHULZ", runs=False),
    Exercise("ex-six-own", "climb", {
        ("square.sub(1).square() / 2", "square.sub(1).square()"):
            "after 2 steps x of rank0 is […], and not […]",
        ("ascend(x, diagonal, n).full_tensor()", "DTensor.from_local(ascend("
         "x.to_local(), diagonal.to_local(), n), mesh, [Shard(0)]).full_tensor()"):
            "after 2 steps x of rank0 is […], and not […]",
        ("mapped.square()", "x.square()"):
            "after 2 steps x of rank0 is […], and not […]",
        ("x -= 0.05", "x += 0.05"): "after 2 steps x of rank0 is […], and not […]",
    }, before="problem = torch.full((6,), 6**-0.5), torch.arange(1.0, 7.0)",
       runs=False),
    Exercise("ex-nine-rule", "(rule / mean_life, best_then / mean_life)", {
        "(0.5**0.5, best_then / mean_life)":
            "Young's interval is 0.707107, and not 1: the rule is the root of 2 C M",
        "(1, 1)": "the best interval is 1, and not 0.698",
    }),
    Exercise("ex-nine-spare", "fit", {
        ("Server, 3", "Server, 4"):
            "the gradients of 60 steps are 240, and not 180: each took all four",
        ("taken + used", "taken + 1"):
            "the gradients of 60 steps are …, and not 180",
        ("(w - 3)", "(w - 2)"): "trainer0's w is …, and not 3",
    }, runs=False),
]  # fmt: skip
LABEL = re.compile(r"^```\{(solution-start|solution-end)\} ?(\S*)", re.MULTILINE)


def of_chapter(label: str) -> tuple[list[str], list[str]]:
    """A chapter's cells of code before the exercises, and those of one solution."""
    for path in this_project().chapters():
        notebook, here, plain, solution = read_chapter(path), None, [], []
        for cell in notebook.cells:
            for kind, name in LABEL.findall(cell.source):
                here = name if kind == "solution-start" else "another's"
            if cell.cell_type == "code" and not tagged(cell, "remove-cell"):
                {None: plain, label: solution}.get(here, []).append(cell.source)
        if solution:
            return plain, solution
    raise ValueError(label)


def check_of(label: str) -> str:
    """The cell that checks an attempt, which stands below the attempt's."""
    chapters = map(read_chapter, this_project().chapters())
    cells = [cell for chapter in chapters for cell in code_cells(chapter)]
    (check,) = [cell.source for cell in cells if cell.id == f"{label}-check"]
    return check


def test_every_exercise_has_a_cell_for_an_attempt_and_a_folded_one_that_checks_it():
    cells = [c for path in this_project().chapters() for c in read_chapter(path).cells]
    found = []
    for exercise, attempt, check in zip(cells, cells[1:], cells[2:], strict=False):
        if label := re.search(
            r"^```\{exercise\}\n:label: (\S+)", exercise.source, re.M
        ):
            found.append(label[1])
            assert (
                attempt.id == f"{label[1]}-attempt" and check.id == f"{label[1]}-check"
            )
            assert tagged(attempt, "remove-cell") and tagged(check, "remove-cell")
            assert check.metadata.jupyter.source_hidden
            assert re.fullmatch(r"(# .+\n)+attempt = \.\.\.  # .+", attempt.source)
    assert sorted(found) == sorted(each.label for each in TABLE), "one row for each"
    few = [each.label for each in TABLE if len(each.wrong) < 2]
    assert not few, "two wrong attempts at each, at least"


def never_ends():
    while True:
        time.sleep(1)


@pytest.mark.parametrize("attempt, said", [
    (..., ""),
    (lambda: 3, "right\n"),
    (lambda: 1 / 0, "worker raised ZeroDivisionError: division by zero\n"),
    (lambda: os._exit(3), "worker exited with code 3 before it finished…\n"),
    (lambda: [3, 3], "it returns [3, 3], and not 3\n"),
    (lambda: "3", "it returns '3', and not 3\n"),
    (lambda: torch.full((1,), 2.0), "it returns [2], and not 3\n"),
    (lambda: math.nan, "it returns nan, and not 3\n"),
    (3, "worker raised TypeError: 'int' object is not callable\n"),
    ((n for n in "3"), "the attempt is not of the form that is asked for: …\n"),
])  # fmt: skip
def test_whatever_is_attempted_is_answered_in_one_line(attempt, said, capsys):
    def twin(function):
        ended = exercises.play(worker=(function,))
        yield exercises.differs("it returns", ended["worker"], 3)

    exercises.check(twin, attempt)
    *_, line = capsys.readouterr().out.splitlines(keepends=True) or [""]
    assert re.fullmatch(re.escape(said).replace("…", ".*"), line)


def test_an_attempt_that_hangs_is_ended(monkeypatch, capsys, limited):
    monkeypatch.setattr(exercises, "DEADLINE", 5.0)

    def twin(function):
        yield f"{exercises.play(worker=(function,))}"

    exercises.check(twin, never_ends)
    assert capsys.readouterr().out == "worker missed the run's deadline of 5 s\n"


@pytest.fixture
def notebook(monkeypatch, tmp_path):
    """The namespace of a `__main__` like a notebook's, in a folder of its own."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return vars(module)


DEFINITIONS = ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef


def run(source: str, namespace: dict, only: tuple = ()) -> None:
    """Run a cell without its asserts, which a wrong attempt would fail.

    With ``only``, its definitions, except for those that need what the chapter ran.
    """
    if written := re.match(r"%%writefile (\w+)\.py\n(.*)", source, re.DOTALL):
        Path(f"{written[1]}.py").write_text(written[2])
        sys.modules.pop(written[1], None)
        return
    for node in ast.parse(TransformerManager().transform_cell(source)).body:
        if isinstance(node, only or ast.stmt) and not isinstance(node, ast.Assert):
            with suppress(ImportError, NameError) if only else nullcontext():
                exec(compile(ast.Module([node], []), "cell", "exec"), namespace)


@pytest.mark.parametrize("exercise", TABLE, ids=lambda exercise: exercise.label)
def test_solution_is_right_and_mistakes_are_named(exercise, notebook, capsys):
    chapter, solution = of_chapter(exercise.label)
    for source in chapter:
        run(source, notebook, DEFINITIONS)
    exec(exercise.before, notebook)

    only = () if exercise.runs else DEFINITIONS

    def solve(old="", new=""):
        assert any(old in source for source in solution), old
        for source in solution:
            run(source.replace(old, new), notebook, only)

    def said(attempt=exercise.attempt):
        notebook["attempt"] = eval(attempt, notebook)
        capsys.readouterr()
        run(check_of(exercise.label), notebook)
        return capsys.readouterr().out.splitlines()[-1]

    solve()
    assert said() == "right"
    found = {}
    for wrong in sorted(exercise.wrong, key=lambda wrong: isinstance(wrong, tuple)):
        if isinstance(wrong, tuple):
            solve(*wrong)
        line = said() if isinstance(wrong, tuple) else said(wrong)
        expected = re.escape(exercise.wrong[wrong]).replace("…", ".*")
        found[wrong] = exercise.wrong[wrong] if re.fullmatch(expected, line) else line
    assert found == exercise.wrong
