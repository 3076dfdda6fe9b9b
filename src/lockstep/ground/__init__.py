"""Modules that do not depend on any other part of lockstep, and on which all other parts build."""
