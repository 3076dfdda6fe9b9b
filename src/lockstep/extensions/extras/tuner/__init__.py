"""Searches before a fit: for a learning rate, and for the largest batch size that fits into memory."""
