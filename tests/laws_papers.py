"""Laws and published losses of papers that came by the path of CONTRIBUTING.md; they register themselves in laws.LAWS."""

from torch import Tensor

from laws import Formula, formula


# ------------------------------------------------------------------------------------------------------------ JustGRPO


@formula("justgrpo")
def justgrpo(f: Formula) -> Tensor:
    """-A log p of every revealed token, A the z-score, over B L."""
    logp = [(b, sum(f.tokens(f.new, k, b, 0.8).values())) for b in f.rows for k in f.states]
    return sum(-f.z_score(b) * total for b, total in logp) / (8 * 4)
