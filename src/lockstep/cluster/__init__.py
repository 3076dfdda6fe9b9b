"""Detection of this process' rank from environment variables, in one file per cluster. Mostly pure functions."""
