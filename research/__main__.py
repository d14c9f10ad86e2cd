"""``python -m research``: grids of runs, self-training, and what the ledger shows."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

import yaml

from minidrl.run import config
from minidrl.run.launch import RunError
from research import controls, grid, tables
from research.ledger import Ledger

RESULTS = Path(__file__).parent / "results"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m research", description="Grids of runs, and what they show.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, text in {"compare": "methods on the config of a run", "study": "a file of research/studies/"}.items():
        sub = verbs.add_parser(name, help=f"a grid: {text}")
        sub.add_argument("config", type=Path)
        sub.add_argument("--methods", type=list_of(str), help="comma-separated; self-training is one")
        sub.add_argument("--rates", type=list_of(float), help="learning rates; of several, one is chosen for each method")
        sub.add_argument("--updates", type=list_of(int), help="updates a rollout")
        sub.add_argument("--seeds", type=int)
        sub.add_argument("--equal", help="updates, or calls: as many network calls for every method")
        sub.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of every cell")
        sub.add_argument("--jobs", type=int, default=2, help="cells at a time, of one thread each (default 2)")
        sub.add_argument("--out", type=Path, help="folder of the runs (default runs/NAME)")
        text = "one line a cell (default research/results/ledger.csv; of compare OUT/ledger.csv)"
        sub.add_argument("--ledger", type=Path, help=text)
        sub.add_argument("--report", action="store_true", help="only print what the ledger holds")
        sub.add_argument("--rehearse", action="store_true", help="the whole grid in a minute, too small to mean anything")
    sub = verbs.add_parser("self-training", help="fine-tuning on own correct answers, as many as the config's RL would sample")
    sub.add_argument("config", type=Path)
    sub.add_argument("--renew", type=int, default=0, help="iterated: after so many steps they come from the trained model")
    sub.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the run")
    sub.add_argument("--out", type=Path, required=True, help="a folder for metrics.jsonl")
    sub = verbs.add_parser("cell", help="one run of a grid, as the others start it")
    sub.add_argument("settings", type=Path)
    sub.add_argument("--self-training", action="store_true")
    given = parser.parse_args(words)
    try:
        verb = {"compare": compare, "study": compare, "self-training": self_training, "cell": run_cell}[given.verb]
        verb(given)
    except KeyboardInterrupt:
        sys.exit("minidrl: interrupted; the same command goes on")
    except (ValueError, OSError, RunError) as error:
        print(f"minidrl: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)


def list_of(kind: type):
    return lambda text: [kind(word) for word in text.split(",")]


def compare(given: argparse.Namespace) -> None:
    changes = {key: getattr(given, key) for key in ("rates", "updates", "seeds", "equal")}
    if given.set:
        changes["settings"] = {key: yaml.safe_load(value) for key, value in settings_of(given).items()}
    study, name = grid.study_of(given.config, given.methods or (), **changes), given.config.stem
    out = given.out or Path("runs") / name
    own = given.verb == "compare" or given.rehearse
    ledger = Ledger(given.ledger or (out if own else RESULTS) / "ledger.csv")
    if not given.report:
        made = grid.Grid(name, grid.rehearsed(study) if given.rehearse else study)
        grid.run(made, out, ledger, given.jobs)
    print(tables.study_report(ledger.path, ledger.curves, name))
    for path in tables.write_figures(ledger.path, ledger.curves, name, out):
        print(path)


def settings_of(given: argparse.Namespace) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in given.set)


def self_training(given: argparse.Namespace) -> None:
    controls.imitation(config.load(config.Train, given.config, settings_of(given)), given.out, given.renew)


def run_cell(given: argparse.Namespace) -> None:
    settings = config.from_dict(config.Train, json.loads(given.settings.read_text()))
    grid.run_cell(settings, given.self_training, given.settings.with_suffix(""))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what runs is asked to save, as by Ctrl-C
    main()
