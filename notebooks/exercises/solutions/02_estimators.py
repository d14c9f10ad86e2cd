import torch


def strata(u):
    K = len(u)
    return (torch.arange(K)[:, None] + u) / K


def pairs(keep, u, noise):
    n = keep.sum(-1)
    count = (u * (n + 1)).floor().long().clamp(max=n)
    rank = noise.masked_fill(~keep, torch.inf).argsort(-1).argsort(-1)
    masked = (rank < count[..., None]) & keep
    both = torch.stack([masked, keep & ~masked], 1).flatten(0, 1)
    size = both.sum(-1).clamp(min=1)  # an empty mask adds 0, whatever its weight
    return both, (n + 1).double() / (len(both) * size)
