"""Laws: what must be true of every equation of minidrl, a file for each section of minidrl/algorithms.py.

A law takes what it judges as its argument: the modules of judged.ROOMS as one, so that the same lines judge the shipped files
and each of their mutants. The truth comes from minidrl.oracle, which enumerates, or from plain arithmetic written in the law;
never from the module itself.

How a random plan is judged. All noise of a plan passes through `alg._uniform`. Under `noise(alg, ...)` the law hands out every
outcome of that noise, one per row of a large batch: midpoints of the cells in which a floor is constant, and all orders of the
positions. The mean over the rows is then the exact expectation, a finite sum. That the real noise has the law that these
outcomes stand for is checked from frequencies with a fixed seed (5 standard errors).

Numbers are float64 throughout, and exact comparisons are to 1e-10.
"""

from laws import (  # noqa: F401
    blocks,
    credit,
    features,
    objectives,
    quadrature,
    random_masks,
    ratios,
    reductions,
    research,
    sampler_order,
    staircases,
    trajectories,
    trust_regions,
)
from laws.formulas import FORMULAS, Formula, formula  # noqa: F401
from laws.registry import *  # noqa: F403
from laws.table import judged_gradient, sized  # noqa: F401
from laws.tools import *  # noqa: F403
