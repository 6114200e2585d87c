"""Group-relative policy optimization: advantages, losses and the sharded learner."""
