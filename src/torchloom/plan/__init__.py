"""What a training step will do with memory and time, before it runs."""
