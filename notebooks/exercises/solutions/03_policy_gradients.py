import torch


def group_mean(reward, num_generations):
    group = reward.view(-1, num_generations)
    return (group - group.mean(1, keepdim=True)).flatten()


def clip(ll, anchor, adv, epsilon_low, epsilon_high):
    ratio = (ll - anchor).exp()
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    return -torch.minimum(ratio * adv, clipped * adv)


def token_sum(logp, step):  # of the lesson: logp (S, B, L), step (B, L)
    revealed = step == torch.arange(len(logp))[:, None, None]
    return (logp * revealed).sum((0, 2))
