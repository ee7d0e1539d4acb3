"""Compiled code as text that runs by itself, and what was assumed when it was made, as data."""
