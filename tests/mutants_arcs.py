"""Wrong versions of what laws_arcs.py judges."""

from mutant import Mutant

GDPO = 'aggregation="sequence_mean_token_mean"'

MUTANTS: list[Mutant] = [
    Mutant("", "count.cumsum(0) - count", "count.cumsum(0)", "law_arc_plan_states", where="_arcs"),
    Mutant("", "count.cumsum(0) - count", "0 * count", "law_arc_plan_states", where="_arcs"),
    Mutant("", "% n < count", "< count", "law_arc_plan_expectation", where="_arcs"),
    Mutant("", "% n", "% inside.shape[1]", "law_arc_plan_expectation", where="_arcs"),
    Mutant("2.11", "n.double() / (num_states * count)", "n.double() / count", "law_arc_plan_expectation"),
    Mutant("2.11", "n.double() / (num_states * count)", "1 / u / num_states", "law_arc_plan_expectation"),
    Mutant("", "< count[..., None]) & inside", "<= count[..., None]) & inside", "law_arc_plan_states", where="_arcs"),
    Mutant(
        "", "noise.masked_fill(~inside, torch.inf).argsort(-1)", "noise.argsort(-1)", "law_arc_plan_expectation", where="_arcs"
    ),
    Mutant("", "count.cumsum(0) - count", "0 * count", "law_arcs_do_not_raise_the_variance_of_positions", where="_arcs"),
    Mutant("", "(part + u)", "(0 * part + u)", "law_arc_plan_frequencies", where="_in_strata"),
    Mutant("", "_uniform(tuple(inside.shape)", "_uniform((1, inside.shape[1])", "law_arc_plan_frequencies", where="_arcs"),
    Mutant("2.11", '_check_count("plan.num_states", num_states)', "", "law_arc_plan_states"),
    Mutant("10.1", GDPO, GDPO.replace("_token_mean", ""), "law_methods", where="row.gdpo"),
    Mutant("10.1", "P(alg.arc_plan, num_states=3", "P(alg.arc_plan, num_states=2", "law_methods", where="row.gdpo-arcs"),
    Mutant("10.1", 'domain="keep"', 'domain="all"', "law_methods", where="row.gdpo-arcs"),
]
