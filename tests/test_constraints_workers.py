"""Constrained modules on other workers."""

import constraint_roles
import pytest

from cdopt_tutorial.engines import Role, launch, serve


@pytest.fixture(scope="module")
def played():
    """What two trainers of one server found; the first spoils another one."""
    play = constraint_roles.play
    roles = {f"trainer{rank}": Role(play, ("ps", rank)) for rank in range(2)}
    servers = dict.fromkeys(("ps", "spoilt"), Role(serve))
    return launch(roles | servers, deadline=120)


class TestRemote:
    @pytest.mark.parametrize(
        "what", ["rref", "twice", "by name", "cut, twice", "remote module"]
    )
    def test_gradients_on_the_owner_are_those_of_one_process(self, played, what):
        assert played["trainer0"][what] <= 1e-14

    def test_without_a_penalty_they_would_not_be(self, played):
        assert played["trainer0"]["no penalty"] > 0.01

    def test_trainers_at_once_do_not_disturb_each_other(self, played):
        assert played["trainer0"]["concurrent"] <= 1e-14
        assert played["trainer1"]["concurrent"] <= 1e-14

    def test_a_step_of_another_may_come_before_the_backward_pass(self, played):
        """It could not if the layer computed with the weight itself."""
        assert "parametrizations.weight" in played["trainer0"]["interrupted"]
        assert "modified by an inplace" in played["trainer0"]["unprotected"]

    def test_all_models_count_and_each_of_them_once(self, played):
        found = played["trainer0"]
        tails = {f"{number}.{layer}.weight" for number in (0, 1, 2) for layer in (0, 2)}
        assert found["names"] == tails | {"4.weight"}
        for what in "penalty", "squares":
            ours, expected = found[what]
            assert ours == pytest.approx(expected, rel=1e-12)

    def test_nothing_constrained_and_nobody_there(self, played):
        assert "no weight of this model is cons" in played["trainer0"]["free"]
        assert "parts refers to a constrained module" in played["trainer0"]["held"]
        gone = played["trainer0"]["gone"]
        assert gone.startswith("RuntimeError: a module on nobody: ") and len(gone) > 40

    def test_projection(self, played):
        before, after = played["trainer0"]["projected"]
        assert before > 0.1 and after < 1e-12
