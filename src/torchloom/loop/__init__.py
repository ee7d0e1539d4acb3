"""Training steps of sharded models: in loops of one's own, and below the engine."""
