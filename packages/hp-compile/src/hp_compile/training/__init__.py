"""What the trainer is made of: agreement of ranks, optimizer, checkpointable state, reports."""
