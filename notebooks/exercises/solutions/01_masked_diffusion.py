import torch


def count_form(keep, u, noise):
    n = keep.sum(-1)
    count = (u * n).floor().long() + 1
    rank = noise.masked_fill(~keep, torch.inf).argsort(-1).argsort(-1)
    masked = rank < count[..., None]
    weight = n.double() / (len(u) * count)
    return masked, weight
