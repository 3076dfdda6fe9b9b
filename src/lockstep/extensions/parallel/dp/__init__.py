"""Data parallel in one process: replicas of the module on several devices."""
