def snis(log_ratio, num_generations, log_cap):
    capped = log_ratio.clamp(max=log_cap).view(-1, num_generations)
    return capped.softmax(1).flatten()


def stable_loss(ll, anchor, adv, score, num_generations, log_cap):
    weight = snis(ll.detach() - anchor, num_generations, log_cap)
    return -weight * adv * score
