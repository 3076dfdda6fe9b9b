"""Lightning's import paths: a table of where each name is in lockstep, and the finder that answers from it."""
