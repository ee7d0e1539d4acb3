"""Complete programs on top of torchloom. They use its public names only, as a user's program would."""
