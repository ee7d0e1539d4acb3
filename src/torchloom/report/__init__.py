"""What a run looked like, drawn from plain records; opens without torch."""
