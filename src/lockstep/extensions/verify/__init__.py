"""The extension verify: the command `lockstep verify`, which compares a script on N ranks with one process."""
