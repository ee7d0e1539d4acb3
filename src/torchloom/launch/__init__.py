"""How the ranks of a run meet: a store that names who is missing, process groups, and meshes."""
