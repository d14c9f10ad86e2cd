import torch


def count_form(keep, u, noise):
    n = keep.sum(-1)
    count = torch.minimum((u * n).floor().long() + 1, n)  # u n may be rounded up to n
    rank = noise.masked_fill(~keep, torch.inf).argsort(-1).argsort(-1)
    masked = (rank < count[..., None]) & keep
    weight = n.double() / (len(u) * count)
    return masked, weight
