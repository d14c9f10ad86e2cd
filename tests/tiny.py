"""Networks, rollouts and settings that take seconds: shared by the end-to-end tests."""

import copy
import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from minidrl import algorithms as alg
from minidrl import denoiser, loop, methods, sampler
from minidrl.oracle import TabularDenoiser
from minidrl.run import checkpoints, config, train
from minidrl.tasks import Verdict
from minidrl.tasks import text as texts
from minidrl.tasks.countdown import Countdown, Puzzle, tokenizer

ROOT = Path(__file__).parents[1]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TASK = Countdown(num_numbers=2, held_out_share=0.3)
SAMPLER = sampler.Sampler(order="left_to_right", temperature=1.0, length=4, block_length=4, tokens_per_step=1)
GROUPS, GENERATIONS, BLOCK = 3, 4, 2


# ------------------------------------------------------------------------------------------------------------- networks


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> denoiser.Denoiser:
    """An untrained network, with a head large enough that its answers are far from uniform."""
    model = denoiser.build(SIZES, tokenizer(), seed).eval()
    with torch.no_grad():
        model.model.lm_head.weight.mul_(10)
    return exact(model.to(dtype))


def exact(model: denoiser.Denoiser) -> denoiser.Denoiser:
    """transformers' RMSNorm computes in float32 whatever the dtype; a float64 network gets torch's, on the same weights."""
    if model.model.dtype != torch.float64:
        return model
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LlamaRMSNorm):
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, dtype=torch.float64)
                norm.weight = child.weight
                setattr(parent, name, norm)
    return model


def tabular() -> TabularDenoiser:
    """Arbitrary conditionals over 3 tokens, one table row for each of the 4**4 states."""
    return TabularDenoiser.random(SAMPLER.length, 3, torch.Generator().manual_seed(3))


NETWORKS = {
    "tiny denoiser, float32": (lambda: network(torch.float32), 1e-5),
    "tiny denoiser, float64": (lambda: network(torch.float64), 1e-12),
    "tabular denoiser, float64": (tabular, 1e-12),
}


def in_blocks(name: str) -> bool:
    """A row whose plan is a staircase, which needs a block-causal network and sampler."""
    return name in methods.METHODS and methods.METHODS[name].plan.func in (alg.block_elbo_plan, alg.block_replay_plan)


def blockwise(model: nn.Module) -> nn.Module:
    """The same weights under block-causal attention; a table has no attention, and says what it is taken for."""
    if isinstance(model, TabularDenoiser):
        table = TabularDenoiser(model.table)
        table.block_length = BLOCK
        return table
    return denoiser.Denoiser(model.model, block_length=BLOCK)


def blockwise_folder(folder: Path) -> Path:
    """A copy of a checkpoint, beside it, that says that its attention is block-causal."""
    twin = folder.with_name(folder.name + "-in-blocks")
    if not twin.exists():
        shutil.copytree(folder, twin)
        words = json.loads((twin / "config.json").read_text())
        (twin / "config.json").write_text(json.dumps(words | {"block_length": BLOCK}))
    return twin


def perturb(model: nn.Module, scale: float) -> None:
    """Every weight moves by about ``scale`` of its tensor's root mean square, as updates would move it."""
    noise = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            drawn = torch.randn(p.shape, generator=noise, dtype=p.dtype)  # the same on every device
            p += scale * p.square().mean().sqrt() * drawn.to(p.device)


def gradient(model: nn.Module) -> torch.Tensor:
    """The accumulated gradient of all weights as one vector, in float64; it is cleared."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return torch.cat([g.flatten() for g in grads]).double()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


# ------------------------------------------------------------------------------------------------------------- rollouts


def rollout(model: nn.Module, settings: sampler.Sampler = SAMPLER, records: tuple[str, ...] = ("entropy",)) -> alg.Rollout:
    """3 left-padded prompts x 4 responses; token 2, [EOS] of the tiny tokenizer, ends a response."""
    noise = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, model.vocab_size, (GROUPS, 5), generator=noise)
    mask = torch.arange(5) >= torch.tensor([[0], [2], [1]])
    words = {"eos_token_id": 2, "num_generations": GENERATIONS, "generator": noise, "records": records}
    if isinstance(model, TabularDenoiser):  # has no attention, and sees nothing but [MASK] in later blocks
        table, plain = TabularDenoiser(model.table), dataclasses.replace(settings, attention="bidirectional")
        made = sampler.generate(table, prompt, mask, plain, **words)
        return dataclasses.replace(made, sampler=settings)
    return sampler.generate(model, prompt, mask, settings, **words)


def experience(run: loop.Run) -> loop.Experience:
    """A rollout of the run's network with arbitrary rewards, a different one for each response."""
    made = rollout(run.model, run.settings.sampler, tuple({"entropy", *run.method.needs}))
    reward = torch.rand(len(made.response), generator=torch.Generator().manual_seed(2), dtype=made.logp.dtype)
    puzzles = TASK.problems(GROUPS, np.random.default_rng(3))
    decoded = texts.decode(run.tok, made.response)
    found = [TASK.judge(puzzles[i // GENERATIONS], text) for i, text in enumerate(decoded)]
    solved, readable = (torch.tensor([getattr(verdict, name) for verdict in found]) for name in ("solved", "readable"))
    return loop.Experience(puzzles, made, decoded, reward, solved, readable)


# ----------------------------------------------------------------------------------------------------------------- runs


def options(name: str) -> dict:
    """No more states than a rollout has steps, for a row that chooses among them."""
    plan = methods.METHODS[name].plan
    chosen = plan.func in (alg.entropy_plan, alg.replay_plan) and plan.keywords["num_states"]
    return {"plan.num_states": min(chosen, SAMPLER.num_steps - 1)} if chosen else {}


def sampler_of(name: str, **changes) -> sampler.Sampler:
    """A row that scores the choice of positions is of interest where the sampler makes one; a staircase needs blocks."""
    if name in methods.METHODS and {"order_logp", "position_logp"} & {*methods.METHODS[name].features}:
        changes = {"order": "low_confidence", **changes}
    if in_blocks(name):
        changes = {"block_length": BLOCK, "attention": "block_causal", **changes}
    return dataclasses.replace(SAMPLER, **changes)


def settings(model: Path | str = "", **changes) -> config.Train:
    """A run of two steps with two updates each."""
    method = changes.get("method", "reinforce")
    words = {"steps": 2, "num_prompts": GROUPS, "num_generations": GENERATIONS, "num_iterations": 2, "task": TASK}
    words["one_pass"] = False  # two passes, where a test does not ask for one
    words |= {"optimizer": config.Optimizer(learning_rate=1e-3), "evaluate": config.Evaluation(n=4)}
    words["sampler"] = sampler_of(method)
    if method in methods.METHODS:
        words["method_options"] = options(method)
    model = blockwise_folder(Path(model)) if model and in_blocks(method) else model
    return config.Train(**{**words, "model": str(model), **changes})


def pretraining(**changes) -> config.Pretrain:
    """Three steps of two demonstrations."""
    words = {"task": TASK, "network": config.Network(**SIZES), "sampler": SAMPLER, "batch_size": 2, "steps": 3}
    return config.Pretrain(**{**words, "evaluate": config.Evaluation(n=2), **changes})


def checkpoint(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    checkpoints.save(network(dtype), tokenizer(), folder)
    return folder


def run_on(monkeypatch, model: nn.Module, **changes) -> loop.Run:
    """A run that finds copies of ``model`` where it would load a checkpoint."""
    model = blockwise(model) if in_blocks(changes.get("method", "")) else model
    monkeypatch.setattr(checkpoints, "load", lambda *_, **__: (copy.deepcopy(model), tokenizer()))
    return train.start(settings(**changes))


def varied_score(response: str) -> float:
    """A reward from the letters alone: an untrained network solves nothing, and equal rewards teach nothing."""
    return sum(map(ord, response)) % 5 / 4


JUDGE = Countdown.judge


def varied_judge(task: Countdown, puzzle: Puzzle, response: str) -> Verdict:
    """The task's own verdict, but for the reward: for tests that put it in the place of ``Countdown.judge``."""
    return JUDGE(task, puzzle, response)._replace(reward=varied_score(response))
