import torch


def staircase(prompt_mask, length, block_length):
    P, tokens = prompt_mask.shape[1], torch.arange(length)
    block = torch.cat([torch.full((P,), -1), tokens // block_length])
    noisy = block[P:]
    clean_rows = torch.cat(
        [block[None, :] <= block[:, None], torch.zeros(P + length, length).bool()], 1
    )
    noisy_rows = torch.cat(
        [block[None, :] < noisy[:, None], noisy[None, :] == noisy[:, None]], 1
    )
    real = torch.ones(len(prompt_mask), P + 2 * length, dtype=torch.bool)
    real[:, :P] = prompt_mask
    return torch.cat([clean_rows, noisy_rows]) & real[:, None, :]


def positions(prompt_mask, length):
    prompt = (prompt_mask.long().cumsum(-1) - 1).clamp(min=0)
    response = prompt_mask.sum(-1, keepdim=True) + torch.arange(length)
    return torch.cat([prompt, response, response], 1)
