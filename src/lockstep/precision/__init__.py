"""Precision plugins, which implement the values of ``Trainer(precision=...)``."""
