"""A chain of blocks in stages, one stage a rank: what torch's pipeline schedules lack for a user's own step."""
