"""The old place of the evaluator; goes when nobody imports it."""

from minidrl.run.evaluate import evaluate  # noqa: F401
