from functools import partial as P

from minidrl.algorithms import elbo_count_plan, group_mean, truncated_is
from minidrl.methods import Method


def my_row():
    return Method(
        name="truncated-elbo",
        title="truncated weights on an ELBO",
        source="exercise 10",
        differs="",
        plan=P(elbo_count_plan, num_states=2, domain="keep", strata=True),
        anchor="old",
        reduction="sequence",
        normalizer="kept_length",
        credit=P(group_mean),
        objective=P(truncated_is, floor=0.0, cap=2.0),
        aggregation="sequence_mean",
    )
