"""`torchloom train`: train a decoder on text, from one laptop to many hosts.

command    the options, checked before any process starts
launcher   starts the workers of one host and forwards signals to them
parent     what ties a worker to its launcher: held-back signals, the end of both
worker     what each rank runs: builds model, data and engine, calls the loop, reports
loop       the steps themselves; takes the engine as an argument
model hf   the built-in decoder and the door to Hugging Face folders
stop terminal    what signals ask for; output that may lose its reader
failing    full memory and lost ranks as one sentence
corpus stream    text with a held-out split; the deterministic order of samples
metrics flops progress summary    what is recorded and shown
"""
