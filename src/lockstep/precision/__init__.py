"""Classes for the values of ``Trainer(precision=...)``."""
