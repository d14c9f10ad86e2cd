"""LEADERBOARD.md, from research/results/ledger.csv and research/results/curves.csv: `make leaderboard`.

`make leaderboard STUDY=research/studies/NAME.yaml`: the laws first, as a result of code that breaks one does not count; then
`python -m minidrl compare` runs what the ledger lacks of the study; then the page is written.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import decoders

from minidrl.run import config
from research import findings, studies

ROOT = Path(__file__).parents[2]
LEDGER, CURVES = ROOT / "research" / "results" / "ledger.csv", ROOT / "results" / "curves.csv"
STUDIES = ROOT / "research" / "studies"
CONFIG = ROOT / "tiny_configs" / "countdown20_cpu.yaml"
LAWS = ["tests/test_laws.py", "-q", "-k", "not mutant"]


def laws_pass() -> bool:
    """True if every law holds for the code as it is."""
    return subprocess.run([sys.executable, "-m", "pytest", *LAWS], cwd=ROOT).returncode == 0


def best_decoder() -> float:
    """Solved share of the base under its best order and temperature, on the held-out puzzles of the reports."""
    rates = decoders.rates(config.load(config.Train, CONFIG))
    return max(rate for by_temperature in rates.values() for rate in by_temperature.values())


def jobs() -> dict[str, tuple[str, int]]:
    """Of each study with the base and the puzzles of CONFIG the order in which its runs decode, and the responses of a step."""
    found, wanted = {}, judged_by(config.load(config.Train, CONFIG))
    for path in sorted(STUDIES.glob("*.yaml")):
        study = studies.study_of(path, config.read(path), {})
        s = config.load(config.Train, study.config, study.settings)
        if judged_by(s) == wanted:
            found[path.stem] = s.sampler.order.replace("_", "-"), s.num_prompts * s.num_generations
    return found


def run(study: Path, methods: str | None) -> int:
    """The exit status of `compare`, which appends to the ledger what it lacks of the study, or of some of its methods."""
    chosen = ["--methods", methods] if methods else []
    return subprocess.run([sys.executable, "-m", "minidrl", "compare", str(study), *chosen], cwd=ROOT).returncode


def judged_by(settings: config.Train) -> tuple[str, int, int]:
    """Bed and held-out puzzles of a run."""
    return studies.bed_of(settings), settings.evaluate.n, settings.evaluate.skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--study", type=Path, help="a file of research/studies/, of which what the ledger lacks is run first")
    parser.add_argument("--methods", help="comma-separated; of the study's methods only these")
    parser.add_argument("--best", type=float, help="solved share of the base's best decoder, if it is known; it takes minutes")
    parser.add_argument("--studies", nargs="+", help="those that count; default: all")
    args = parser.parse_args(argv)
    if args.methods and not args.study:
        print(f"methods: got {args.methods} without --study; allowed with it", file=sys.stderr)
        return 2
    if args.study and args.study.resolve() not in {(STUDIES / f"{name}.yaml").resolve() for name in jobs()}:
        told = f"a file of {STUDIES.name}/ with the base and held-out puzzles of {CONFIG.name}, which alone are compared here"
        print(f"study: got {args.study}; allowed {told}", file=sys.stderr)
        return 2
    if not args.study and not LEDGER.exists():
        allowed = "after make leaderboard STUDY=research/studies/NAME.yaml"
        print(f"ledger: got no {LEDGER.relative_to(ROOT)}; allowed {allowed}", file=sys.stderr)
        return 2
    if not laws_pass():
        print("laws: got one that fails; allowed none", file=sys.stderr)
        return 1
    if args.study and (status := run(args.study.resolve(), args.methods)):
        return status
    best = best_decoder() if args.best is None else args.best
    page = findings.leaderboard(LEDGER, CURVES, best, jobs(), args.studies)
    (ROOT / "LEADERBOARD.md").write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
