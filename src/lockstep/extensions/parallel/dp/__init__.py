"""Data parallel in one process, with replicas of the module on several devices."""
