"""The command line: ``python -m minidrl VERB``. One verb is one call; a user's mistake is one line
and exit status 2."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from minidrl.run.launch import (
    LocalError,
    RunError,
    check_address,
    is_panic,
    kept_notes,
    launched_processes,
    launched_rank,
    lost_partner,
    one_line,
    shown,
    tell,
    tell_notes,
)

GOES_ON = {
    **dict.fromkeys(("train", "pretrain"), "the same command with --resume goes on"),
    **dict.fromkeys(("compare", "controls", "evaluate"), "the same command goes on"),
}
SHIPPED = Path("tiny_configs/countdown_cpu.yaml")
WITHOUT_DOCSTRINGS = ("where", "tasks")  # verbs that work under python -OO
MOST_JOBS = 256
OF_AN_EVALUATION = {"n": "512", "temperature": "1.0", "samples": "1", "seed": "0", "batch": "128"}
_OF_EVALUATION = ("task.", "sampler.")  # keys of a config that evaluate takes
_NO_SHARES = ("low", "high", "n", "tokens", "calls", "seconds")


def main(argv: list[str] | None = None) -> int:
    """Run a verb; returns the exit status.

    0; 1 where a run had to stop; 2 for wrong settings and files; 130 and 143 after Ctrl-C and
    SIGTERM.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started this
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        if hasattr(stream := getattr(sys, name), "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # it may not know every character
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its remarks would be further lines
    arguments, rest = _parser().parse_known_args(argv)
    try:
        _refuse_process(arguments.verb)
        _refuse_empty(arguments)
        with kept_notes():
            arguments.run(arguments, _overrides(rest))
        sys.stdout.flush()
    except BrokenPipeError:  # who read the output has left, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, OSError, MemoryError, RecursionError, OverflowError) as error:
        return _report(one_line(error) or type(error).__name__, 2, error)
    except (RunError, FloatingPointError) as error:
        return _report(error, 1, error)
    except RuntimeError as error:
        if lost_partner(error):
            said = f"a connection to another process of this run broke: {one_line(error)}"
            return _report(f"{said}; {GOES_ON['train']}", 1, LocalError())
        if not (asked := re.search("memory: you tried to allocate ([0-9]+)", str(error))):
            raise
        size = f"{int(asked[1]) / 1e9:.1f} GB"
        return _report(f"memory: got an array of {size}; allowed what is free here", 2, error)
    except TypeError as error:
        if "TextEncodeInput" not in str(error):  # what the tokenizer says of a lone surrogate
            raise
        allowed = "characters that can be encoded, no lone surrogate"
        return _report(f"text: got some that is no Unicode text; allowed {allowed}", 2, error)
    except KeyboardInterrupt as error:
        asked, said = getattr(error, "signal", signal.SIGINT), one_line(error) or "interrupted"
        kept = arguments.verb != "evaluate" or arguments.out  # without --out nothing is
        said += f"; {GOES_ON.get(arguments.verb if kept else '', 'nothing was written')}"
        return _report(said, 128 + asked, error)
    except BaseException as error:
        # The tokenizers library raises Exception itself, and panics that are none.
        if type(error) is not Exception and not is_panic(error):
            raise
        got = f"files with which the tokenizers library breaks off ({one_line(error)})"
        return _report(f"tokenizer.json: got {got}; allowed those of a working tokenizer", 2, error)
    return 0


def _refuse_process(verb: str) -> None:
    processes, rank = launched_processes(), launched_rank()
    check_address()
    if rank >= processes:
        allowed = f"below WORLD_SIZE ({processes})"
        raise LocalError(f"RANK: got {rank} in the environment; allowed {allowed}")
    if verb != "train" and processes > 1:
        allowed = "1, only train shares its work"
        raise ValueError(f"{verb}: got {processes} processes; allowed {allowed}")
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ValueError("cwd: got a folder that was removed; allowed one that is there") from None
    if sys.flags.optimize > 1 and verb not in WITHOUT_DOCSTRINGS:
        allowed = "python and python -O, transformers reads docstrings"
        raise ValueError(f"python -OO: got {verb}, which needs transformers; allowed {allowed}")


def _refuse_empty(arguments: argparse.Namespace) -> None:
    # As if an option had not been given: the default would be taken in silence.
    for key, value in vars(arguments).items():
        if value == "" or (isinstance(value, list) and "" in value):
            raise ValueError(f"{key}: got ''; allowed text, or leave it out")


def _report(said: BaseException | str, status: int, error: BaseException) -> int:
    if isinstance(error, LocalError) or launched_rank() == 0:  # else the others say the same
        tell(said)
    return status


def _print(text: object) -> None:
    # What is printed may come from a checkpoint or a ledger.
    tell_notes()
    try:
        print(shown(str(text)), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ValueError(f"stdout: got {error.strerror}; allowed a place to write to") from None


class _Parser(argparse.ArgumentParser):
    settings = ""  # the class of minidrl.run.config whose keys --help lists

    def format_help(self) -> str:
        if not self.settings:
            return super().format_help()
        from minidrl.run import index

        return f"{super().format_help()}\n{index.settings_help(self.settings)}\n"

    def error(self, message: str):
        tell(f"{message}; see python -m minidrl --help")
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    text = "Reinforcement learning for masked diffusion language models."
    parser = _Parser(prog="minidrl", description=text, allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=_Parser)

    def verb(name: str, run: Callable, text: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=run)
        return sub

    _add_training(verb)
    _add_models(verb)
    _add_comparisons(verb)
    _add_tables(verb)
    return parser


def _add_training(verb: Callable[..., argparse.ArgumentParser]) -> None:
    rl = "reinforcement learning; any setting can be given as --key value"
    for name, run, text in (
        ("pretrain", _pretrain, "train the tiny masked diffusion LM itself"),
        ("train", _train, rl),
    ):
        sub = verb(name, run, text)
        sub.settings = name.capitalize()
        sub.add_argument("config")
        sub.add_argument("--out", default=None, help="output folder (default runs/<config name>)")
        text = "continue from the folder's newest whole checkpoint"
        sub.add_argument("--resume", action="store_true", help=text)


def _add_models(verb: Callable[..., argparse.ArgumentParser]) -> None:
    sub = verb("memory", _memory, "the bytes that a run will need, part by part; nothing is loaded")
    sub.add_argument("config")
    sub.add_argument("--gpus", default="1", help="over which the weights are cut, as by torchrun")
    sub.add_argument("--json", action="store_true")
    text = "does everything work with these weights? seven checks, from loading to an RL step"
    sub = verb("verify", _verify, text)
    sub.add_argument("model", help="a folder, or the name of a model on the Hub")
    text = "a question whose answer is known (default: one for the kind of model)"
    sub.add_argument("--prompt", help=text)
    sub.add_argument("--answer", help="the word that the greedy reply must hold")
    text = "on which the loss is computed: what the model was trained on, 8 tokens or more"
    sub.add_argument("--text", help=text)
    sub.add_argument("--device", help="default cuda where torch finds a GPU, else cpu")
    sub.add_argument("--dtype", default="stored")
    text = "an existing folder with room for a copy of the weights (default: the temporary one)"
    sub.add_argument("--out", help=text)


def _add_comparisons(verb: Callable[..., argparse.ArgumentParser]) -> None:
    text = "solved rate on held-out problems; any --task.key and --sampler.key can be given"
    sub = verb("evaluate", _evaluate, text)
    sub.add_argument("model", nargs="?", help="a folder, or the name of a model on the Hub")
    text = "default: that of the config; python -m minidrl tasks lists them"
    sub.add_argument("--task", help=text)
    text = f"where task and sampler are read from (default: the model's run, else {SHIPPED})"
    sub.add_argument("--config", help=text)
    default = OF_AN_EVALUATION
    sub.add_argument("--n", default=default["n"])
    sub.add_argument("--temperature", default=default["temperature"])
    sub.add_argument("--samples", default=default["samples"], help="k > 1 also reports pass@k")
    text = "of the response, in tokens; several, as in 128,256,512, are evaluated one by one"
    sub.add_argument("--length", help=f"{text} (default: the config's)")
    sub.add_argument("--seed", default=default["seed"])
    text = "responses at a time; changes no result"
    sub.add_argument("--batch", default=default["batch"], help=text)
    text = "a JSON file for protocol, result and every response; the same command goes on"
    sub.add_argument("--out", help=text)
    text = "two such files: can they be compared, and how far are they apart?"
    sub.add_argument("--compare", nargs=2, metavar=("A", "B"), help=text)
    sub.add_argument("--json", action="store_true")
    _add_compare(verb("compare", _compare, "a grid: methods x rates x updates a rollout x seeds"))
    text = "what a run's rise is to be compared with: temperatures, greedy, pass@8, self-training"
    sub = verb("controls", _controls, text)
    sub.add_argument("runs", nargs="+", help="folders of finished runs")


def _add_compare(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("config", help="the file of a study; with --methods that of a run")
    text = "comma-separated, self-training is one; of a study's methods only these"
    sub.add_argument("--methods", help=text)
    sub.add_argument("--rates", help="with --methods: learning rates (default: the config's)")
    sub.add_argument("--updates", help="with --methods: updates a rollout (default: 1)")
    sub.add_argument("--seeds", help="number of seeds (default: the study's; with --methods 3)")
    sub.add_argument("--equal", help="updates, or calls: as many network calls for every method")
    sub.add_argument("--hours", help="refuse a grid that will take longer (default 8)")
    sub.add_argument("--jobs", default="2", help="cells at a time, of one thread each (default 2)")
    sub.add_argument("--out", help="folder of the runs (default runs/<config name>)")
    text = "one line a cell (default research/results/ledger.csv; with --methods OUT/ledger.csv)"
    sub.add_argument("--ledger", help=text)
    sub.add_argument("--report", action="store_true", help="only print what the ledger holds")
    text = "the whole grid in a minute or so, much too small to mean anything"
    sub.add_argument("--rehearse", action="store_true", help=text)


def _add_tables(verb: Callable[..., argparse.ArgumentParser]) -> None:
    text = "bias, std and network calls of every likelihood estimator against the exact values"
    verb("estimators", _estimators, text).add_argument("--json", action="store_true")
    sub = verb("methods", _methods, "every method; with a name, that method's card")
    sub.add_argument("name", nargs="?", help="a row of the table")
    sub.add_argument("--json", action="store_true")
    text = "the lines that implement a tag, a term, an arXiv number or a method"
    verb("where", _where, text).add_argument("word", nargs="+")
    sub = verb("tasks", _tasks, "what can be trained on, and how it is judged")
    sub.add_argument("name", nargs="?", help="of the task that --check is for")
    text = "a file of rows: can each be asked and judged? any --task.key can be given"
    sub.add_argument("--check", metavar="PATH", help=text)
    sub.add_argument("--model", help="whose tokenizer counts the tokens of the prompts")


def _overrides(rest: list[str]) -> dict[str, str]:
    """``--a.b value`` and ``--a.b=value`` pairs."""
    pairs, i = {}, 0
    while i < len(rest):
        key, equals, value = rest[i].partition("=")
        if not re.fullmatch("--[^-].*", key):
            raise ValueError(f"argument {rest[i]!r}: allowed --key value")
        if not equals:
            if i + 1 >= len(rest):
                raise ValueError(f"{key[2:]}: no value given; allowed --{key[2:]} value")
            i, value = i + 1, rest[i + 1]
        if "" in key[2:].split("."):
            raise ValueError(f"argument {key!r}: allowed --key value, a name around each point")
        pairs[key[2:]] = value
        i += 1
    return pairs


def _no_overrides(overrides: dict[str, str]) -> None:
    if overrides:
        raise ValueError(f"--{next(iter(overrides))}: unknown option; see python -m minidrl --help")


def _written(key: str, name: str) -> Path:
    """A path that will be written to; one that goes up is made plain, so that no folder is made
    only to leave it."""
    from minidrl.run import config

    config.check_path(key, name)
    return Path(name).resolve() if ".." in Path(name).parts else Path(name)


def _out(arguments) -> Path:
    out = _written("out", arguments.out or str(Path("runs") / Path(arguments.config).stem))
    if os.fsencode(out) != str(out).encode(errors="replace"):  # safetensors writes names in UTF-8
        allowed = "ASCII, or any name under a locale of UTF-8, or with PYTHONUTF8=1"
        raise ValueError(f"out: got {str(out)!r}; allowed {allowed}")
    return out


def _count(name: str, text: str, most: int, least: int = 1) -> int:
    value = int(text) if re.fullmatch("[0-9]{1,18}", text) else -1
    if value < least:
        raise ValueError(f"{name}: got {text!r}; allowed integers from {least}")
    if value > most:
        raise ValueError(f"{name}: got {text!r}; allowed up to {most}")
    return value


def _temperature(text: str) -> float:
    from minidrl.run import untrusted

    try:
        value = untrusted.number(text)
    except ValueError:
        value = -1.0
    if value < 0:
        raise ValueError(f"temperature: got {text!r}; allowed numbers from 0")
    return value


def _pretrain(arguments, overrides) -> None:
    from minidrl.run import config, pretrain

    settings = config.load(config.Pretrain, arguments.config, overrides)
    summary = pretrain.pretrain(settings, _out(arguments), arguments.resume)
    _print(json.dumps(summary, indent=2))


def _train(arguments, overrides) -> None:
    from minidrl.run import config, distributed, train

    settings, out = config.load(config.Train, arguments.config, overrides), _out(arguments)
    with distributed.process_group(settings.device):
        s = train.train(settings, out, arguments.resume)
    if not distributed.is_main():
        return
    rise = f"{s['solved_before']:.1%} -> {s['solved_after']:.1%}"
    what = f"of {s['evaluated_on']} held-out puzzles at temperature {s['temperature']:g}"
    cost = f"{s['steps']} steps in {s['seconds']:.0f} s"
    curve = out / "curve.png"
    where = f"curve in {curve}" if curve.is_file() else f"no {curve}: matplotlib is missing"
    _print(f"{s['method']}, seed {s['seed']}: {rise} {what}, {cost}; {where}")


def _memory(arguments, overrides) -> None:
    from minidrl.run import config, memory

    settings = config.load(config.Train, arguments.config, overrides)
    parts = memory.predicted_memory(settings, _count("gpus", arguments.gpus, config.MOST))
    whole = parts | {"peak": memory.peak(parts)}
    _print(json.dumps(whole) if arguments.json else memory.table(parts))


def _verify(arguments, overrides) -> None:
    import torch

    from minidrl.run import verify

    _no_overrides(overrides)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    names = ("prompt", "answer", "text", "dtype", "out")
    checks = []
    words = {name: getattr(arguments, name) for name in names}
    for check in verify.verify(arguments.model, device=device, **words):
        _print(check)
        checks.append(check)
    failed = [check.name for check in checks if check.status == "FAILED"]
    if failed:
        share = f"{len(failed)} of {len(checks)}"
        raise RunError(f"verify: {share} checks failed: {', '.join(failed)}")


def _evaluate(arguments, overrides) -> None:
    from minidrl.run import checkpoints, config, evaluation
    from minidrl.tasks import held_out

    if arguments.compare:
        _no_overrides(overrides)
        for key in ("model", "task", "config", "length", "out", "json", *OF_AN_EVALUATION):
            value = getattr(arguments, key)
            if value and value != OF_AN_EVALUATION.get(key):
                raise ValueError(f"{key}: got {value!r} with --compare; allowed one of them")
        _print(evaluation.compare(*map(Path, arguments.compare)))
        return
    if arguments.model is None:
        raise ValueError("model: got none; allowed a folder, or --compare A B")
    _no_overrides({key: x for key, x in overrides.items() if not key.startswith(_OF_EVALUATION)})
    if (key := "sampler.temperature") in overrides:
        raise ValueError(f"{key}: got {overrides[key]!r}; allowed in its place --temperature")
    n = _count("n", arguments.n, config.MOST)
    samples = _count("samples", arguments.samples, config.MOST // n)
    how = {"n": n, "samples": samples, "batch": _count("batch", arguments.batch, config.MOST)}
    how["seed"] = _count("seed", arguments.seed, 10**17, least=0)
    temperature = _temperature(arguments.temperature)
    given = arguments.length.split(",") if arguments.length else []
    lengths = [_count("length", length, config.MOST) for length in dict.fromkeys(given)]
    settings = _evaluated(arguments, overrides, config, lengths[0] if lengths else None)
    decoding = dataclasses.replace(settings.sampler, temperature=temperature)
    at = [evaluation.with_length(decoding, n) for n in lengths or [decoding.length]]
    for one in at:
        config.check_length(settings.task, one.length)
    out = _written("out", arguments.out) if arguments.out else None
    with evaluation.opened(out):
        held_out(settings.task, n)  # before anything is loaded
        model, tok = checkpoints.load(arguments.model)
        how |= {"name": arguments.model, "out": out}
        with checkpoints.blamed(model, arguments.model):
            found = [evaluation.evaluate(model, tok, settings.task, s, **how) for s in at]
        if out is not None:
            evaluation.write(out, found)
    for one in found:
        _print_scores(one, arguments, temperature, several=len(found) > 1)


def _evaluated(arguments, overrides, config, length: int | None):
    """The settings of an evaluation: a config's, of whose task another name leaves nothing."""
    from minidrl.tasks import DEFAULT

    path, chosen = Path(arguments.config or _config_of(arguments.model)), {}
    data = config.read(path)
    own, task = data.get("sampler"), data.get("task", {})
    if arguments.task and (
        not isinstance(task, dict) or task.get("name", DEFAULT) != arguments.task
    ):
        chosen["task"] = {"name": arguments.task}
    if length is not None:
        chosen["sampler.length"] = length
        if isinstance(own, dict) and own.get("block_length") == own.get("length"):
            chosen["sampler.block_length"] = length  # a response was one block, and is one again
    return config.load(config.Train, path, chosen | overrides)


def _print_scores(found, arguments, temperature: float, several: bool) -> None:
    result, length = found["result"], found["protocol"]["length"]
    if arguments.json:
        told = {"model": arguments.model, "temperature": temperature, "length": length}
        _print(json.dumps(told | result))
        return
    names = [key for key in result if key not in _NO_SHARES]
    said = ", ".join(f"{key} {result[key]:.1%}" for key in names)
    interval = f"95 % interval of solved {result['low']:.1%} to {result['high']:.1%}"
    each = result["tokens"] / len(found["rows"])
    said = f"{said}; {interval}, {each:.1f} tokens a response"
    at = f"length {length}: " if several else ""
    _print(f"{at}{said}, on {result['n']} held-out problems")


def _config_of(model: str) -> Path:
    """What a model was trained by, or is to be trained by: of its run, else a shipped config."""
    from minidrl.run import config

    folder = Path(model)
    shipped = SHIPPED if SHIPPED.is_file() else Path(__file__).parents[2] / SHIPPED
    for path in (folder / "config.yaml", folder.parent / "config.yaml"):
        if path.is_file() and "model" in config.read(path):
            return path
    for path in sorted(shipped.parent.glob("*.yaml")):
        base = path.parent / str(config.read(path).get("model", ""))
        if base.resolve() == folder.resolve():
            return path
    return shipped


def _compare(arguments, overrides) -> None:
    from minidrl.run import report
    from research import findings, studies

    jobs = _count("jobs", arguments.jobs, max(MOST_JOBS, os.cpu_count() or 1))
    study, out = _study(arguments, overrides), _out(arguments)
    name, default = Path(arguments.config).stem, Path("research/results/ledger.csv")
    if study.config == str(Path(arguments.config).resolve()) or arguments.rehearse:
        default = out / "ledger.csv"
    ledger = studies.Ledger(Path(arguments.ledger or default))
    if arguments.rehearse:
        study = studies.rehearsed(study)
    grid = studies.Grid(name, study)
    if not arguments.report:
        studies.run(grid, out, ledger, jobs)
    _print(findings.study_report(ledger.path, ledger.curves, name, grid.planned(ledger)))
    if report.can_draw():
        from research import figures

        for figure in figures.write_figures(ledger.curves, ledger.path, name, out):
            _print(figure)


def _study(arguments, overrides):
    """The study of a file, of which ``--methods`` picks; or of ``--methods`` and a run's config."""
    from minidrl.run import config
    from research import studies

    path, own = Path(arguments.config), ("seeds", "equal", "hours", "rates", "updates")
    given = {key: getattr(arguments, key) for key in own if getattr(arguments, key) is not None}
    for key in given.keys() & {"rates", "updates"}:
        given[key] = f"[{given[key]}]"
    names, data = arguments.methods and arguments.methods.split(","), config.read(path)
    if names and "methods" not in data:
        rate = config.load(config.Train, path, {"method": "reinforce"}).optimizer.learning_rate
        data = {"config": path.name, "methods": names, "rates": [rate], "seeds": 3}
        names = None
    return studies.study_of(path, data, overrides | given, names)


def _controls(arguments, overrides) -> None:
    from minidrl.run import config, report
    from research import controls

    _no_overrides(overrides)
    for run in arguments.runs:
        config.check_path("runs", run)
    folders = [Path(run) for run in arguments.runs]
    controls.check_once(folders)
    for folder in folders:
        if not controls.read(folder):
            report.read_summary(folder)  # raises where the run is not finished
            controls.measure(folder)
    _print(controls.table(folders))


def _estimators(arguments, overrides) -> None:
    from minidrl.run import estimators

    _no_overrides(overrides)
    rows = estimators.estimator_rows()
    _print(json.dumps(rows) if arguments.json else estimators.estimator_table(rows))


def _methods(arguments, overrides) -> None:
    from minidrl.run import index

    _no_overrides(overrides)
    if not arguments.name and not arguments.json:
        _print(index.method_list())
        return
    if arguments.name:
        index.row_place(arguments.name)  # a wrong name is answered before torch is imported
    from minidrl.run import cards

    if arguments.name:
        told = cards.card(arguments.name)
        _print(json.dumps(told) if arguments.json else cards.card_text(told))
    else:
        _print(json.dumps(cards.method_rows()))


def _where(arguments, overrides) -> None:
    from minidrl.run import index

    _no_overrides(overrides)
    _print(index.answer(" ".join(arguments.word)))


def _tasks(arguments, overrides) -> None:
    from minidrl.tasks import TASKS, task_class

    if arguments.check or arguments.name:
        _check_rows(arguments, overrides)
        return
    _no_overrides(overrides)
    if arguments.model:
        raise ValueError(f"model: got {arguments.model!r} without --check; allowed with it")
    for name in TASKS:
        _print(f"{name:<12}{task_class(name).about}")


def _check_rows(arguments, overrides) -> None:
    from minidrl.run import checkpoints, config
    from minidrl.tasks import DEFAULT, task_class

    kind = task_class(arguments.name or DEFAULT)
    if not arguments.check:
        _no_overrides(overrides | ({"model": ""} if arguments.model else {}))
        _print(f"{arguments.name:<12}{kind.about}")
        return
    if not hasattr(kind, "check"):
        got = f"--check with {arguments.name or DEFAULT}, whose problems are generated"
        raise ValueError(f"tasks: got {got}; allowed the name of a task that reads files")
    _no_overrides({key: x for key, x in overrides.items() if not key.startswith("task.")})
    keys = {key[5:]: config.parsed(key, value) for key, value in overrides.items()}
    task = config.from_dict(kind, keys, "task.")
    tok = checkpoints.load_tokenizer(Path(arguments.model)) if arguments.model else None
    _print(task.check(arguments.check, tok))
