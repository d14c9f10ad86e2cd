"""Laws and published losses of papers that came by the path of CONTRIBUTING.md; they register themselves in laws.LAWS."""

from typing import Any

from torch import Tensor

from laws import Formula, formula


# ------------------------------------------------------------------------------------------------------------ JustGRPO


@formula("justgrpo")
def justgrpo(f: Formula) -> Tensor:
    """-A log p of every revealed token, A the z-score, over B L."""
    logp = [(b, sum(f.tokens(f.new, k, b, 0.8).values())) for b in f.rows for k in f.states]
    return sum(-f.z_score(b) * total for b, total in logp) / (8 * 4)


# ---------------------------------------------------------------------------------------------------------------- ESPO


@formula("espo")
def espo(f: Formula) -> Tensor:
    """PPO on exp(ELBO change / L), and beta (ELBO - ELBO of the reference)^2 / (2 L): L counts padding, L = 4 here."""

    def elbo(model: Any, b: int) -> Tensor:
        states = [f.tokens(model, k, b) for k in f.states]
        return sum(5 / len(logp) * sum(logp.values()) for logp in states if logp) / len(f.states)

    total = 0.0
    for b in f.rows:
        new, old, ref = (elbo(model, b) for model in (f.new, f.old, f.ref))
        ratio = ((new - old.detach()) / 4).exp()
        total = total + f.clipped(ratio, f.centred(b) * 4 / 3, 0.2, 0.2) + 0.01 * (new - ref.detach()).square() / 8
    return total / 8
