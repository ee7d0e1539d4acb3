"""Training steps of sharded models: `torchloom`'s calls for loops of one's own, and what the engine is made of.

shard_model       shards a model, `compile` compiles it; `across_ranks` reduces and pads small tensors
optimizers        makes the optimizer and the facts that ranks compare, `elementwise` says whether it may step shards, `owned_params` are what it steps
ownership         lets one rank step each parameter that an optimizer must see whole; `together` steps several optimizers as one
optimizer_hooks   follow each step: `slices` of stage 1, steps counted and rates noted for other ranks
clip              gradients by their norm over all ranks, and the first one that is not finite
offloads          what waits on the host; `stream` takes optimizer states through the step
step_log          the numbers of a step, for recorders and `trackers`; `plan_check` compares them with the plan
precision         dtypes and casts
"""
