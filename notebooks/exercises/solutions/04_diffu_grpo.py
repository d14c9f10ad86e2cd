import torch


def mean_field(prompt_mask, noise, keep, p):
    prompt = (noise < p) & prompt_mask
    hidden = torch.cat([prompt, torch.ones_like(keep)], -1)
    return hidden, keep


def two_means(total, lengths):
    token_mean = total.sum() / lengths.sum()
    answer_mean = (total / lengths).mean()
    return token_mean, answer_mean
