"""Extensions: optional packages that the core does not import, and that can be deleted; see `ground/extensions.py`."""
