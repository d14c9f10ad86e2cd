def update(model, optimizer, rollout, n):
    group = rollout.reward.view(-1, n)
    adv = (group - group.mean(1, keepdim=True)).flatten()
    loss = -(adv * rollout.logp(model).sum(1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def reinforce_loss(logp, old, adv):  # of the lesson
    return -adv * logp.sum(1)
