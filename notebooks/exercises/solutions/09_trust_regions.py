import torch


def trust_mask(log_ratio, adv, outside):
    away = torch.sign(adv) * log_ratio > 0
    return ~(outside & away)


def drpo_loss(ll, anchor, adv, delta):
    ratio, mu = (ll - anchor).exp(), anchor.exp()
    penalty = adv.abs() * mu * (ratio - 1) ** 2 / (2 * delta)
    return -(ratio * adv - penalty)
