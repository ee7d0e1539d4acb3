"""What a step costs in memory and time, and which of its values to keep.

Planning works on captured graphs with fake tensors: it never runs the user's graph.
"""
