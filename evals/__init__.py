"""Evaluations: what a model, or a yardstick, is worth on a split."""
