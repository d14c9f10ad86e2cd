"""benchmarks/decoders.py: every order at every temperature, each judged as ``evaluate`` judges it; the best with its error."""

import dataclasses

import tiny
from minidrl import checkpoints, config, controls, sampler, trainer
from minidrl.tasks.countdown import Countdown


def test_every_order_and_temperature_is_judged_as_evaluate_judges_it(tmp_path, monkeypatch):
    monkeypatch.setattr(Countdown, "score", tiny.varied_score)
    settings = tiny.settings(model=str(tiny.checkpoint(tmp_path / "base")), evaluate=config.Evaluation(n=16))
    asked, evaluate = [], trainer.evaluate
    monkeypatch.setattr(trainer, "evaluate", lambda *a, **k: asked.append((a[2], a[3], k)) or evaluate(*a, **k))
    found = tiny.script("decoders").rates(settings)
    assert list(found) == list(sampler.ORDERS) and {tuple(by) for by in found.values()} == {controls.TEMPERATURES}
    decoders = [dataclasses.replace(settings.sampler, order=o, temperature=t) for o in found for t in controls.TEMPERATURES]
    assert [decoding for _, decoding, _ in asked] == decoders
    assert all(task == settings.task and how == {"n": 16, "skip": 0, "samples": 1} for task, _, how in asked)
    model, tok = checkpoints.load(settings.model)
    cell = evaluate(model, tok, settings.task, decoders[-1], n=16)["solved"]
    assert found[decoders[-1].order][decoders[-1].temperature] == cell


def test_the_best_decoder_is_named_with_one_standard_error():
    found = {"random": {0.0: 0.1, 1.0: 0.2}, "low_confidence": {0.0: 0.36, 1.0: 0.3}}
    *lines, best = tiny.script("decoders").table(found, 400).splitlines()
    assert [line.replace(" ", "") for line in lines[2:4]] == ["|random|10.0|20.0|", "|low_confidence|36.0|30.0|"]
    assert best == "best: low_confidence at temperature 0: 36.0 % +- 2.4 of 400 held-out puzzles"
