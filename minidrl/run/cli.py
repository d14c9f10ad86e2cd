"""The command line: ``python -m minidrl VERB``. One verb is one call.

Exit status: 0; 1 where a run had to stop; 2 for a user's mistake, told in one line; 130 and 143
after Ctrl-C and SIGTERM. The verbs import what they need themselves: ``--help`` needs no torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from minidrl.run import lookup
from minidrl.run.launch import LocalError, RunError, launched_rank, log, one_line, show_remarks

GOES_ON = {
    **dict.fromkeys(("train", "pretrain"), "with --resume it goes on from a checkpoint"),
    "evaluate": "with --out the same command goes on",
}
SHIPPED = Path(__file__).parents[2] / "tiny_configs/countdown_cpu.yaml"
UsageError = typer.BadParameter.__mro__[1]  # typer has it, and gives it no name of its own

app = typer.Typer(add_completion=False, rich_markup_mode=None)
ANY_KEY = {"allow_extra_args": True, "ignore_unknown_options": True}
Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="a YAML file, as in tiny_configs/")]
Out = Annotated[Path, typer.Option(help="output folder (default runs/CONFIG)", show_default=False)]
Device = Annotated[str, typer.Option(help="default: cuda where torch finds a GPU")]
Dtype = Annotated[
    Literal["stored", "float32", "bfloat16"], typer.Option(help="of weights and activations")
]
Resume = Annotated[bool, typer.Option("--resume", help="go on from the newest checkpoint")]


@app.callback()
def _minidrl() -> None:
    """Reinforcement learning for masked diffusion language models."""


def main(argv: list[str] | None = None) -> int:
    """Run a verb; returns the exit status."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its remarks would be further lines
    # Before torch loads: how long a thread of its products spins before it sleeps. By default one
    # that waits for a core of a busy machine makes the others spin for all that time.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    show_remarks()
    arguments = sys.argv[1:] if argv is None else argv
    if sys.platform == "win32":
        return _report("Windows itself cannot run this; under WSL 2 everything works", 2)
    try:
        with typer.main.get_command(app).make_context("minidrl", list(arguments)) as context:
            context.command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except UsageError as error:
        return _report(f"{error.format_message().rstrip('.')}; see python -m minidrl --help", 2)
    except BrokenPipeError:  # who read the output has left, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, OSError, MemoryError) as error:
        return _report(error, 2)
    except ImportError as error:  # of a package that only some verbs need
        return _report(f"{error}; pip install {error.name}", 2)
    except (RunError, FloatingPointError) as error:
        return _report(error, 1)
    except KeyboardInterrupt as error:
        said = GOES_ON.get(arguments[0], "nothing was written")
        status = 128 + getattr(error, "signal", signal.SIGINT)
        return _report(f"{one_line(error) or 'interrupted'}; {said}", status)
    return 0


def _report(said: BaseException | str, status: int) -> int:
    if isinstance(said, LocalError) or launched_rank() == 0:  # else the others say the same
        print(f"minidrl: {one_line(said)}", file=sys.stderr)
    return status


def _overrides(context: typer.Context, *sections: str) -> dict[str, str]:
    """``--a.b value`` and ``--a.b=value`` pairs; with sections, of keys in these only."""
    pairs, rest = {}, list(context.args)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key.strip("."):
            raise ValueError(f"argument {word!r}: allowed --key value")
        if sections and not key.startswith(sections):
            raise ValueError(f"--{key}: unknown option; see python -m minidrl --help")
        if not equals and not rest:
            raise ValueError(f"{key}: no value given; allowed --{key} value")
        pairs[key] = value if equals else rest.pop(0)
    return pairs


# ---------------------------------------------------------------------------------------- training


class WithSettings(TyperCommand):
    """Lists the settings below its own options."""

    def format_epilog(self, context: Any, formatter: Any) -> None:
        formatter.write(f"\n{lookup.settings_help(self.name.capitalize())}\n")


@app.command(cls=WithSettings, context_settings=ANY_KEY)
def pretrain(
    context: typer.Context, config_file: Config, out: Out = None, resume: Resume = False
) -> None:
    """Train the tiny masked diffusion LM itself, or fine-tune a checkpoint (init)."""
    from minidrl.run import config
    from minidrl.run.pretrain import pretrain

    settings = config.load(config.Pretrain, config_file, _overrides(context))
    summary = pretrain(settings, out or Path("runs") / config_file.stem, resume)
    print(json.dumps(summary, indent=2))


@app.command(cls=WithSettings, context_settings=ANY_KEY)
def train(
    context: typer.Context, config_file: Config, out: Out = None, resume: Resume = False
) -> None:
    """Train by reinforcement learning.

    Any setting can be given as --key value.
    """
    from minidrl.run import config, distributed
    from minidrl.run.train import train

    settings = config.load(config.Train, config_file, _overrides(context))
    out = out or Path("runs") / config_file.stem
    with distributed.process_group(settings.device):
        s = train(settings, out, resume)
    if distributed.is_main():
        rise = f"{s['solved_before']:.1%} -> {s['solved_after']:.1%}"
        what = f"of {s['evaluated_on']} held-out problems at temperature {s['temperature']:g}"
        cost = f"{s['steps']} steps in {s['seconds']:.0f} s"
        print(
            f"{s['method']}, seed {s['seed']}: {rise} {what}, {cost}; curve in {out / 'curve.png'}"
        )


@app.command(context_settings=ANY_KEY)
def memory(
    context: typer.Context,
    config_file: Config,
    gpus: Annotated[int, typer.Option(min=1, help="over which the weights are cut")] = 1,
) -> None:
    """Predict the bytes of RL or of fine-tuning, part by part.

    Nothing is loaded. Any setting can be given as --key value.
    """
    from minidrl.run import config, memory

    settings = config.load(_kind(config_file), config_file, _overrides(context))
    print(memory.table(memory.predicted_memory(settings, gpus)))


# ------------------------------------------------------------------------------------------ models


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(help="a folder, a name on the Hub, a .gguf file or a known .whl")
    ],
    out: Annotated[Path, typer.Option(help="a new folder")],
    shift: Annotated[
        bool, typer.Option("--shift", help="the state before a token predicts it")
    ] = False,
    mask_token: Annotated[str, typer.Option(help="that becomes [MASK]")] = "",
) -> None:
    """Make a causal model bidirectional, with a mask token, for fine-tuning to start from.

    Llama, Qwen2 and Qwen3. Nothing is trained here.
    """
    from minidrl.run.convert import convert

    print(convert(source, out, shift=shift, mask_token=mask_token))


@app.command()
def verify(
    model: Annotated[str, typer.Argument(help="a folder, or the name of a model on the Hub")],
    device: Device = None,
    dtype: Dtype = "stored",
) -> None:
    """Does everything work with these weights?

    Five checks, from loading to an RL step. One writes the weights into TMPDIR.
    """
    from minidrl.run import verify

    checks = []
    for check in verify.verify(model, _device(device), dtype):
        print(check, flush=True)
        checks.append(check)
    failed = [check.name for check in checks if check.status == "FAILED"]
    if failed:
        share = f"{len(failed)} of {len(checks)}"
        raise RunError(f"verify: {share} checks failed: {', '.join(failed)}")


def _device(asked: str | None) -> str:
    import torch

    from minidrl.run.train import check_device

    device = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    return device


@app.command()
def merge(
    run: Annotated[Path, typer.Argument(help="of a run with LoRA, or a folder of adapters")],
    out: Annotated[Path, typer.Argument(help="a new folder")],
) -> None:
    """Add trained adapters to their base's weights.

    The result is a checkpoint in the base's own format, for the code that it came with.
    """
    from minidrl.run import checkpoints, folders

    if out.exists():
        raise ValueError(f"out: got {str(out)!r}, which is there already; allowed a new folder")
    newest = [run, *folders.checkpoint_folders(run)][-1]
    model, tok = checkpoints.merged(newest)
    with folders.folder(out) as part:
        checkpoints.save(model, tok, part)
    print(f"{out}: the base of {newest} with its adapters added")


@app.command(context_settings=ANY_KEY)
def evaluate(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="a folder, or the name of a model on the Hub")
    ] = None,
    config_file: Annotated[
        Path, typer.Option("--config", help="of task and sampler (default: the model's run)")
    ] = None,
    n: Annotated[int, typer.Option(min=1, help="held-out problems")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy")] = 1.0,
    samples: Annotated[int, typer.Option(min=1, help="k > 1 also reports pass@k")] = 1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    batch: Annotated[int, typer.Option(min=1, help="at a time; changes no result")] = 128,
    device: Device = None,
    dtype: Dtype = "stored",
    out: Annotated[
        Path, typer.Option(help="a JSON file for protocol, result and every response")
    ] = None,
    compare: Annotated[
        tuple[Path, Path], typer.Option(metavar="A B", help="two such files: how far apart?")
    ] = None,
) -> None:
    """Solved rate on held-out problems.

    Any --task.key and --sampler.key can be given.
    """
    from minidrl.run import checkpoints, config
    from minidrl.run import evaluate as evaluator
    from minidrl.run.pretrain import as_taught
    from minidrl.tasks import held_out

    overrides = _overrides(context, "task.", "sampler.")
    if compare:
        print(evaluator.compare(*compare))
        return
    if model is None:
        raise ValueError("model: got none; allowed a folder, or --compare A B")
    if (key := "sampler.temperature") in overrides:
        raise ValueError(f"{key}: got {overrides[key]!r}; allowed in its place --temperature")
    if out and out.exists():
        raise ValueError(f"out: got {str(out)!r}, which is there already; allowed another --out")
    path = config_file or _config_of(model)
    kind = _kind(path)
    settings = config.load(kind, path, overrides)
    skip = settings.evaluate.skip
    held_out(settings.task, n, skip)  # before anything is loaded
    network, tok = checkpoints.load(model, _device(device), checkpoints.dtype_of(dtype))
    rule = settings.sampler
    if kind is config.Pretrain:
        network, rule = as_taught(settings, network)
    decoding = dataclasses.replace(rule, temperature=temperature)
    how = {"n": n, "skip": skip, "samples": samples, "seed": seed, "name": model, "out": out}
    asked = (network, tok, settings.task, decoding)
    found = evaluator.record(*asked, micro_batch=batch, **how)
    if out is not None:
        evaluator.write(out, found)
    print(evaluator.in_words(found))


def _kind(path: Path) -> Any:
    """What a config file is of: ``config.Train`` or ``config.Pretrain``."""
    from minidrl.run import config

    return config.Train if "model" in config.read(path) else config.Pretrain


def _config_of(model: str) -> Path:
    """What a model was trained by; of a pre-trained one a shipped config of its RL goes before, if
    it asks the same problems."""
    from minidrl.run import config
    from minidrl.tasks import held_out

    def asked(kind: Any, path: Path) -> list[Any]:
        return held_out(config.load(kind, path).task, 16)

    folder = Path(model)
    places = (folder / "config.yaml", folder.parent / "config.yaml")
    own = next((path for path in places if path.is_file()), None)
    if own and "model" in config.read(own):
        return own
    for path in sorted(SHIPPED.parent.glob("*.yaml")):
        base = path.parent / str(config.read(path).get("model", ""))
        if base.resolve() != folder.resolve():
            continue
        if own is None or asked(config.Train, path) == asked(config.Pretrain, own):
            return path
    if own is None:
        log.warning(f"{model} names no task; asked as {SHIPPED} says, or give --config")
    return own or SHIPPED


# ----------------------------------------------------------------------------------------- look-ups


@app.command()
def methods(
    name: Annotated[str, typer.Argument(help="of a method, whose parts are then explained")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="not only this project's papers")
    ] = False,
) -> None:
    """List the methods, or say what one does."""
    print(lookup.card(name) if name else lookup.method_list(everything))


@app.command()
def where(
    words: Annotated[list[str], typer.Argument(help="2.3, 2510.08554, staircase, ...")],
) -> None:
    """Find what implements an equation, a paper or a term."""
    found = lookup.where(words)
    if not found:
        raise ValueError(f"where: got {' '.join(words)!r}, which stands in no docstring of minidrl")
    print("\n".join(found))


@app.command(context_settings=ANY_KEY)
def tasks(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="of a task")] = None,
    check: Annotated[
        Path, typer.Option(help="a file of rows: can each be asked and judged?")
    ] = None,
    model: Annotated[Path, typer.Option(help="whose tokenizer counts the prompts' tokens")] = None,
) -> None:
    """What can be trained on, and how it is judged.

    Any --task.key can be given with --check.
    """
    from minidrl.tasks import DEFAULT, TASKS, task_class

    settings = _overrides(context, "task.")
    if check is None:
        for task in [name] if name else TASKS:
            print(f"{task:<12}{task_class(task).about}")
        return
    from minidrl.run import checkpoints, config

    kind = task_class(name or DEFAULT)
    keys = {key[5:]: config.parsed(key, value) for key, value in settings.items()}
    tok = checkpoints.load_tokenizer(model) if model else None
    print(config.from_dict(kind, keys, "task.").check(str(check), tok))
