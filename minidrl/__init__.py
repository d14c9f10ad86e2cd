"""Reinforcement learning for masked diffusion language models: every estimator and objective in one
readable module."""

__version__ = "0.2.0"
