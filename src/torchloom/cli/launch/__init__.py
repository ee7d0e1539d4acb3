"""Starting the ranks of a command on this host: `torchloom train`, `run` and `calibrate`.

launcher    starts workers with torch's elastic agent, forwards signals, returns the exit code
rendezvous  the store where workers meet, on loopback
parent      what ties a worker to its launcher: held-back signals, the end of both
terminal    output that may lose its reader
"""
