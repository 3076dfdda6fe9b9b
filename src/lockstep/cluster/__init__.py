"""Detection of this process' rank from environment variables. Each cluster has a file of its own."""
