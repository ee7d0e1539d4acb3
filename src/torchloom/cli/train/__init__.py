"""`torchloom train`: train a decoder on text, from one laptop to many hosts.

command    the options, checked before any process starts
launcher   starts the workers of one host and forwards signals to them
worker     what each rank runs: builds model, data and engine, calls the loop, reports
loop       the steps themselves; takes the engine as an argument
model hf   the built-in decoder and the door to Hugging Face folders
corpus stream    text with a held-out split; the deterministic order of samples
metrics flops progress summary    what is recorded and shown
"""
