"""Shares of the ranks that follow their speed: how long steps take, and what is made of it."""
