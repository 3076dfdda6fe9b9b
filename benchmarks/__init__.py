"""Measurements: each script here writes a page of docs/."""
