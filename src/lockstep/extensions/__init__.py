"""Extensions: packages that the core does not know. Each can be deleted; see `lockstep.ground.extensions`."""
