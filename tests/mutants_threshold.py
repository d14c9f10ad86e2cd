"""Wrong versions of the equations of laws_threshold.py: the exact kernel of threshold decoding, its staircase."""

from mutant import Mutant

KERNEL, SCORE, TIES = "law_threshold_kernel", "law_threshold_score_is_the_policy_gradient", "law_threshold_kernel_on_ties"
IMPOSSIBLE = "law_threshold_impossible_sets"

MUTANTS: list[Mutant] = [
    Mutant("4.5", "confidence < log_threshold(threshold)", "confidence > log_threshold(threshold)", KERNEL),
    Mutant("4.5", "unsure & (count > 1)", "unsure & (count > 0)", KERNEL),
    Mutant("4.5", "unsure & (count > 1)", "unsure & (count > 2)", KERNEL),
    Mutant("4.5", ".any(-1, keepdim=True)", ".all(-1, keepdim=True)", KERNEL),
    Mutant("4.5", "* scored / count.clamp(min=1)", "* scored", IMPOSSIBLE),
    Mutant("4.5", "* scored / count.clamp(min=1)", "/ count.clamp(min=1)", IMPOSSIBLE),
    Mutant("4.5", "torch.finfo(order.dtype).tiny", "1e-8", IMPOSSIBLE),
    Mutant("4.5", "torch.where(unsure & (count > 1), nothing.to(order.dtype), order)", "order", KERNEL),
    Mutant("4.5", "nothing.to(order.dtype), order)", "order + nothing.to(order.dtype), order)", IMPOSSIBLE),
    Mutant("4.5", "confidence < log_threshold(threshold)", "confidence <= log_threshold(threshold)", TIES),
    Mutant("4.5", "reached = limit >= floor", "reached = limit > floor", TIES, where="threshold_to_beat"),
    Mutant("4.5", "reached = limit >= floor", "reached = limit < floor", KERNEL, where="threshold_to_beat"),
    Mutant("4.5", "limit.masked_fill(reached, floor)", "limit", KERNEL, where="threshold_to_beat"),
    Mutant("4.5", "limit.masked_fill(reached, floor)", "limit * 0 + floor", KERNEL, where="threshold_to_beat"),
    Mutant("4.5", "later & ~reached", "later", TIES, where="threshold_to_beat"),
    Mutant("4.5", "later & ~reached", "later | reached", TIES, where="threshold_to_beat"),
    Mutant("4.5", "later & ~reached", "~later & ~reached", TIES, where="threshold_to_beat"),
    Mutant("4.5", "math.log(threshold)", "math.log10(threshold)", KERNEL, where="log_threshold"),
    Mutant("4.5", "math.log(threshold)", "threshold", SCORE, where="log_threshold"),
    Mutant("4.5", "else -math.inf", "else 0.0", KERNEL, where="log_threshold"),
    Mutant("4.5", "tau is not None:", "False:", SCORE, where="_order_logp"),
    Mutant("4.5", "if tau is None:", "if True:", KERNEL, where="_order_logp"),
    Mutant("4.5", 'logp = logp + feature["order_logp"]', "pass", "law_egspo_exact_row_with_a_threshold", where="reduced"),
    # ----------------------------------------------------------------------- 3.5, blocks that take different numbers of steps
    Mutant("3.5", "first = first.where(first >= 0, at_most)", "first = at_most.expand_as(first)", "law_threshold_staircase"),
    Mutant("3.5", "final.minimum(last)", "last.expand_as(final)", "law_threshold_staircase"),
    Mutant(
        "3.5",
        "first = first.where(first >= 0, at_most)",
        "first = at_most.expand_as(first)",
        "law_threshold_replay_reproduces_the_sampler",
    ),
]
