"""Searches before a fit: a learning rate, and the largest batch that fits the device."""
