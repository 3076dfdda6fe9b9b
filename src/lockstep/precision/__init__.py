"""Number formats of a run, one class per precision."""
