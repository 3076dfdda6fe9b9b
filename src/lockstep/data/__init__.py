"""Which sample goes to which rank: the order of data, its cut among the ranks, and feeds of weighed windows."""
