"""Strategies and their engines: the base classes, and a folder for each engine."""
