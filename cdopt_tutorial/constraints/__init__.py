"""Weights on manifolds, by constraint dissolving; on one worker or on many."""

from cdopt_tutorial.constraints.layers import dissolve, dissolve_recurrent
from cdopt_tutorial.constraints.manifolds import (
    MANIFOLDS,
    stiefel_constraint,
    stiefel_map,
)
from cdopt_tutorial.constraints.measure import (
    Constraints,
    Feasibility,
    feasibility,
    penalty,
    project_,
)
