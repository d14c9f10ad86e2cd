import torch

import minidrl.algorithms as alg


def top_steps(entropy, last, num_states):
    decided = torch.arange(len(entropy))[:, None] > last
    ranked = entropy.masked_fill(decided, -torch.inf)
    steps = ranked.argsort(dim=0, descending=True, stable=True)[:num_states]
    return steps, ~decided.gather(0, steps)


def passed_over(logits, limit, later, temperature):
    confidence = alg.token_confidence(logits)
    limit, later = limit[:, None], later[:, None]
    loses = (confidence < limit) | ((confidence == limit) & later)
    p = (logits / temperature).softmax(-1)
    F = (p * loses).sum(-1)
    return F.clamp(min=torch.finfo(F.dtype).tiny).log()
