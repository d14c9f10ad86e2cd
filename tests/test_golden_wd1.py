"""Parity of the row wd1 with the numbers of the official code (xiaohangt/wd1), where a call holds one prompt's group."""

import torch

from laws import double
from minidrl import methods
from parity import cases, one_prompt, same


@cases("wd1", "wd1_plus_minus")
def test_loss_and_gradient(case):
    given, out = case["inputs"], case["outputs"]
    rollout, plan = one_prompt(given["keep"])
    method, reward = methods.METHODS["wd1"], double(given["rewards"])
    adv = methods.advantages(method, plan, rollout, reward)
    same(adv, (double(out["w_plus"]) - double(out["w_minus"])).tolist(), "weights")
    logp = double(given["logp_new"])[None].requires_grad_()
    loss = methods.method_loss(method, plan, rollout, {"logp": logp}, adv, None, None)
    same(loss, out["loss"], "loss")
    same(torch.autograd.grad(loss, logp)[0][0], out["grad_logp_new"], "gradient")
