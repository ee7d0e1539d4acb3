"""Shapes of DeepSpeed files with ZeRO-3, as public repositories hold them: one of each class.

Keys and values of real files of the same kind, typed anew and shortened to one row each; `source` names a
repository that has such a file.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Tree = dict[str, Any]
A = "auto"
CPU, NOT = {"device": "cpu", "pin_memory": True}, {"device": "none", "pin_memory": True}


class Shape(NamedTuple):
    """One shape of a configuration."""

    name: str
    source: str
    config: Tree
    refused: str = ""
    """Path of the key for which 8 ranks refuse it; "" where it can be used."""


def of(*parts: Tree, **more: object) -> Tree:
    """Return one configuration from its parts."""
    tree: Tree = {}
    for part in (*parts, more):
        tree.update(part)
    return tree


def batch(train: object = A, micro: object = A, accum: object = A) -> Tree:
    """Return the batch triple; None leaves a value out."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {
        name: value
        for name, value in zip(names, (train, micro, accum), strict=True)
        if value is not None
    }


def scale(enabled: object = A, power: int = 16, **more: object) -> Tree:
    """Return `fp16` with the loss scaling that the documentation of transformers shows."""
    usual = {"loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
    return {"fp16": {"enabled": enabled, "initial_scale_power": power, **usual, **more}}


def adamw(lr: object = A, betas: object = A, eps: object = A, decay: object = A) -> Tree:
    """Return an optimizer section; None leaves a parameter out."""
    given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay}
    params = {name: value for name, value in given.items() if value is not None}
    return {"optimizer": {"type": "AdamW", "params": params}}


def warmup(most: object = A, steps: object = A, total: object = None, least: object = A) -> Tree:
    """Return a schedule: WarmupLR, or WarmupDecayLR where `total` is given."""
    params = {"warmup_min_lr": least, "warmup_max_lr": most, "warmup_num_steps": steps}
    if total is None:
        return {"scheduler": {"type": "WarmupLR", "params": params}}
    return {"scheduler": {"type": "WarmupDecayLR", "params": {**params, "total_num_steps": total}}}


def cosine(**params: object) -> Tree:
    """Return a cosine schedule."""
    return {"scheduler": {"type": "WarmupCosineLR", "params": params}}


def zero(*parts: Tree, **more: object) -> Tree:
    """Return `zero_optimization` of stage 3."""
    return {"zero_optimization": of({"stage": 3, "contiguous_gradients": True}, *parts, more)}


def buckets(reduce: object = A, prefetch: object = A, threshold: object = A) -> Tree:
    """Return the three sizes that a Trainer computes from the hidden size of the model."""
    return {
        "reduce_bucket_size": reduce,
        "stage3_prefetch_bucket_size": prefetch,
        "stage3_param_persistence_threshold": threshold,
    }


def live(most: float = 1e9, group: float = 1e9) -> Tree:
    """Return limits on what is gathered at a time."""
    names = ("stage3_max_live_parameters", "stage3_max_reuse_distance")
    return {**dict.fromkeys(names, most), "sub_group_size": group}


BF16, BF16_AUTO = {"bf16": {"enabled": True}}, {"bf16": {"enabled": A}}
FP16_OFF, FP16_ON = {"fp16": {"enabled": False}}, {"fp16": {"enabled": True}}
CLIP, CLIP_AUTO = {"gradient_clipping": 1.0}, {"gradient_clipping": A}
OVERLAP, NO_OVERLAP = {"overlap_comm": True}, {"overlap_comm": False}
GATHER = {"stage3_gather_16bit_weights_on_model_save": True}
OLD_GATHER = {"stage3_gather_fp16_weights_on_model_save": True}
BOTH = {"offload_optimizer": CPU, "offload_param": CPU}
STATES = {"offload_optimizer": CPU, "offload_param": {"device": "none"}}
NOWHERE = {"offload_optimizer": NOT, "offload_param": NOT}
SCATTER = {"allgather_partitions": True, "reduce_scatter": True}
USUAL = of(OVERLAP, buckets(), live(), GATHER)
TRAINER = of(batch(), CLIP_AUTO, {"steps_per_print": 2000, "wall_clock_breakdown": False})
RECOMPUTE = {
    "activation_checkpointing": {
        "partition_activations": True,
        "cpu_checkpointing": True,
        "contiguous_memory_optimization": False,
        "number_checkpoints": None,
    }
}
ACCELERATE = {  # an Accelerate YAML, turned into JSON
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "machine_rank": 0,
    "num_processes": 8,
    "same_network": True,
    "use_cpu": False,
}

# A row per shape.
# fmt: off
SHAPES = (
    # The example of transformers' documentation and its variants: optimizer and schedule from a Trainer.
    Shape("warmup, both offloaded", "huggingface/transformers", of(TRAINER, scale(), BF16_AUTO,
        adamw(), warmup(), zero(USUAL, BOTH))),
    Shape("warmup, profiled, constant scale", "duyubo/GPU-Training-Profiling-for-DeepSpeed",
        of(TRAINER, scale(loss_scale=512, min_loss_scale=0), BF16_AUTO, adamw(), warmup(),
        zero(USUAL, NOWHERE), flops_profiler={"enabled": True, "profile_step": 1, "output_file":
        "./flops.txt"})),
    Shape("warmup, full precision", "jianbangzhang/train_qwen2.5_npu", of(TRAINER,
        scale(enabled=False), {"bf16": {"enabled": False}}, adamw(), warmup(), zero(USUAL, BOTH),
        flash_attention=False)),
    Shape("warmup, torch's Adam, NVMe path unused", "huggingface/accelerate", of(TRAINER,
        batch(accum=1), scale(), BF16_AUTO, warmup(), {"optimizer": {"type": "AdamW", "params":
        {"lr": A, "weight_decay": A, "torch_adam": True, "adam_w_mode": True}}}, zero(of(USUAL,
        stage3_gather_16bit_weights_on_model_save=A), offload_optimizer={**CPU, "nvme_path":
        "/nvme"}, offload_param={**CPU, "nvme_path": "/nvme"}))),
    Shape("warmup, recomputed, states offloaded", "whalarion/SOO-replication", of(TRAINER,
        {"fp16": {"enabled": True, "initial_scale_power": 16}}, adamw(), warmup(), zero(USUAL,
        STATES), RECOMPUTE)),
    Shape("decay, last iteration written", "youngjin-create/byt5-Korean", of(TRAINER, scale(),
        adamw(), zero(OVERLAP, buckets(), live(), OLD_GATHER, BOTH), {"scheduler": {"type":
        "WarmupDecayLR", "params": {"last_batch_iteration": -1, "total_num_steps": A,
        "warmup_min_lr": A, "warmup_max_lr": A, "warmup_num_steps": A}}})),
    Shape("decay, two parameters", "shibing624/MedicalGPT", of(TRAINER, {"fp16": {"enabled":
        A}}, BF16_AUTO, adamw(betas=None, eps=None), warmup(total=A), zero(OVERLAP, buckets(),
        GATHER, offload_optimizer={"device": "none"}, offload_param={"device": "none"}))),
    Shape("decay, type of traffic", "Josephguogxy/TransCity-VLM", of(batch(train=None), CLIP,
        FP16_OFF, BF16, adamw(), warmup(total=A), zero(NO_OVERLAP, SCATTER, buckets(5e7, 2e7,
        1e5), GATHER, sub_group_size=1e9), communication_data_type="bf16", cpu_adam=False,
        min_lr=5e-7)),
    Shape("decay, unknown key", "AcadifySolution/fine-tuning-pipeline", of(TRAINER, {"fp16":
        {"enabled": A}}, BF16_AUTO, adamw(), warmup(total=A), zero(OVERLAP, buckets(), live(),
        STATES, stage3_gather_1d_weights=True))),
    Shape("cosine, large scale", "zhenye234/LLaSA_training", of(TRAINER, CLIP, scale(power=64),
        BF16_AUTO, adamw(), cosine(total_num_steps=A, warmup_min_ratio=0.03, warmup_num_steps=A,
        cos_min_ratio=0.1), zero(of(USUAL, NO_OVERLAP, stage3_prefetch_bucket_size=2123366),
        NOWHERE))),
    # A schedule without an optimizer: the program brings one.
    Shape("warmup alone", "zhenduow/UserSim", of(TRAINER, scale(), BF16_AUTO, warmup(),
        zero(USUAL, BOTH))),
    Shape("warmup, rate left to the schedule", "approach0/llmm", of(TRAINER, scale(),
        BF16_AUTO, adamw(lr=None, betas=[0.9, 0.999], eps=1e-8), {"scheduler": {"type":
        "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": A, "warmup_num_steps": A,
        "warmup_type": "linear"}}}, zero(USUAL, offload_optimizer=CPU))),
    # An optimizer from a Trainer, which brings its own schedule.
    Shape("optimizer, sizes of stage 2", "AmphionTeam/FlexiSLM", of(TRAINER, scale(),
        BF16_AUTO, adamw(), zero(OVERLAP, SCATTER, NOWHERE, allgather_bucket_size=2e8,
        reduce_bucket_size=2e8, ignore_unused_parameters=True))),
    Shape("optimizer, sizes alone", "ZikunWan/EHR-state", of(TRAINER, scale(), BF16_AUTO,
        adamw(), zero(OVERLAP, buckets(), GATHER), find_unused_parameters=False)),
    Shape("optimizer, micro batch written", "WLiK/GLRec", of(batch(train=None, micro=1),
        FP16_ON, adamw(), zero(USUAL, BOTH, round_robin_gradients=True), steps_per_print=500)),
    # No optimizer: a Trainer or Accelerate brings it.
    Shape("plain, no overlap, offloaded", "hiyouga/LLaMA-Factory", of(TRAINER, scale(),
        BF16_AUTO, zero(of(USUAL, NO_OVERLAP), BOTH), zero_allow_untested_optimizer=True,
        comms_config={"verbose": False}, monitor_config={"enabled": True, "csv_monitor":
        {"enabled": False}})),
    Shape("plain, offloaded", "2U1/Qwen2-VL-Finetune", of(TRAINER, scale(), BF16_AUTO,
        zero(OVERLAP, buckets(), live(), BOTH, gather_16bit_weights_on_model_save=True),
        steps_per_print=1e5)),
    Shape("plain, scale of its own, offloaded", "U-rara/SEPIT", of(TRAINER, scale(power=8,
        hysteresis=4, consecutive_hysteresis=True), BF16_AUTO, zero(OVERLAP, buckets(), live(),
        BOTH, gather_16bit_weights_on_model_save=True))),
    Shape("plain, nothing gathered ahead", "NVIDIA/audio-flamingo", of(batch(), scale(),
        BF16_AUTO, zero(of(USUAL, stage3_prefetch_bucket_size=0)))),
    Shape("plain, zeros for limits", "axolotl-ai-cloud/axolotl", of(batch(), CLIP_AUTO,
        scale(power=32, auto_cast=False), BF16_AUTO, zero(OVERLAP, buckets(), live(0, 0),
        GATHER))),
    Shape("plain, inputs cast, offloaded", "a configuration of Accelerate", of(batch(),
        CLIP_AUTO, scale(enabled=True, auto_cast=True), {"bf16": {"enabled": False}},
        zero(OVERLAP, buckets(), live(1e9, 1e7), GATHER, BOTH),
        zero_force_ds_cpu_optimizer=False)),
    Shape("plain, old name", "sajastu/transformers-sent-curr", of(TRAINER, scale(),
        zero(OVERLAP, buckets(), live(), OLD_GATHER, BOTH))),
    Shape("plain, key in the wrong place", "YaooXu/StructLM", of(TRAINER,
        scale(loss_scale_window=100, min_loss_scale=1e-10), GATHER, zero(OVERLAP, SCATTER,
        allgather_bucket_size=1e8, reduce_bucket_size=1e8))),
    Shape("plain, own sizes", "AndreRab/Large-Scale-computing", of(batch(), CLIP, FP16_OFF,
        BF16, zero(OVERLAP, buckets(5e8, 5e8, 1e6), GATHER, sub_group_size=1e9))),
    Shape("plain, buffers on the host", "Jasper-Liang12138/LLM-Adapters-MoreResearch",
        of(TRAINER, BF16_AUTO, zero(NO_OVERLAP, buckets(), live(2e7, 1e8), GATHER,
        offload_optimizer={**CPU, "buffer_count": 4, "fast_init": False}, offload_param={**CPU,
        "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9}))),
    Shape("plain, no clipping by a switch", "tvmsandy33/LaTRO_DeepSeek", of(batch(), BF16,
        zero(NO_OVERLAP, GATHER, offload_optimizer=CPU, stage3_param_persistence_threshold=A,
        round_robin_gradients=True), gradient_clipping=False)),
    Shape("plain, leaf modules", "12345txy/RL", of(batch(), CLIP, BF16, zero(USUAL,
        leaf_module={"name_suffixes": ["lm_head"]}))),
    Shape("an Accelerate YAML at the top", "accelerate config, as JSON", of(batch(), CLIP_AUTO,
        BF16_AUTO, ACCELERATE, zero(USUAL, BOTH))),
    # An optimizer with values of its own, beside "auto".
    Shape("own optimizer, total batch left open", "goyalayus/wordle-prime-rl-reproduction",
        of(batch(micro=1, accum=16), CLIP, scale(enabled=True), {"bf16": {"enabled": False}},
        adamw(1e-5, [0.9, 0.999], 1e-8, 0.01), warmup(1e-5, 10, least=0), zero(USUAL, NOWHERE))),
    Shape("own optimizer, long cosine", "keigotak/llm-training-pipeline", of(batch(train=512,
        micro=2), CLIP, BF16, adamw(1.5e-4, [0.9, 0.95], 1e-8, 0.1), cosine(warmup_num_steps=2000,
        total_num_steps=100000), zero(OVERLAP, buckets(5e7, 5e7, 1e5), GATHER,
        sub_group_size=1e9), RECOMPUTE)),
    Shape("own optimizer, precision left open", "Atharva-Rasane/Checkpoint_baseline",
        of(batch(train=None, micro=2, accum=8), CLIP, {"fp16": {"enabled": A}}, BF16_AUTO,
        adamw(3e-4, [0.9, 0.95], 1e-8, 0.1), warmup(3e-4, 100, least=0), zero(OVERLAP, GATHER,
        BOTH))),
    Shape("own optimizer, rate 0", "safr-ai-lab/pandora-llm", of(batch(accum=1), CLIP_AUTO,
        {"fp16": {"enabled": True, "loss_scale": 1}}, adamw(0, [0.9, 0.999], 1e-8, 0.01),
        zero(NO_OVERLAP, buckets(5e8, 5e8, 1e6), live(1e7, 1e7), BOTH), RECOMPUTE)),
    # Nothing is left open.
    Shape("whole, nothing but the stage", "jcksanderson/backdoor-merging", of(batch(train=None,
        micro=1, accum=16), BF16, zero(OVERLAP))),
    Shape("whole, for a program of its own", "wenhaoli-xmu/tokenmix2", of(batch(train=8,
        micro=1, accum=1), BF16, zero(buckets(1e8, 5e8, 1e6)), {"optimizer": {"type": "Adam",
        "params": {"torch_adam": True, "lr": 2e-5, "betas": [0.9, 0.95]}}, "scheduler": {"type":
        "WarmupDecayLR", "params": {"total_num_steps": 120000, "warmup_num_steps": 1000}}},
        train_epochs=3, enable_gradient_clipping_with_value=1.0, wandb={"enabled": True,
        "project": "hybrid"})),
    Shape("whole, inputs cast, offloaded", "a guide to training with NeMo", of(batch(2048, 4,
        64), CLIP, scale(enabled=True, power=32, auto_cast=True), zero(OVERLAP, buckets(5e7, 5e7,
        5e6), BOTH))),
    # Written otherwise than documented, or refused.
    Shape("numbers as text", "dwanev/gpt-neo-fine-tuning-example2", of(CLIP_AUTO, scale(),
        adamw(), warmup(), zero(OVERLAP, buckets("1", "10", "0"), live(1e9, 1e14), OLD_GATHER,
        BOTH))),
    Shape("the old switch of offloading, a misspelt key", "exelents/try_t5_siamese", of(scale(enabled=True, power=12),
        {"optimizer": {"type": "Adam", "params": {"lr": 1e-5, "betas": [0.8, 0.999], "eps": 1e-8,
        "weight_decay": 3e-7}}}, warmup(3e-5, 500, least=0), zero(OVERLAP, OLD_GATHER, cpu_offload=True,
        cpu_offload_params=True, reduce_bucket_size=3e6, stage3_param_persitance_threshold=100000)),
        refused="zero_optimization.stage3_param_persitance_threshold"),
    Shape("a batch of one rank", "Yu7-code/minicpm_7", of(batch(2, 2, 1), CLIP_AUTO,
        scale(enabled=False), {"bf16": {"enabled": True, "loss_scale": 0, "hysteresis": 2}},
        adamw(betas=[0.9, 0.95]), warmup(), zero(USUAL, BOTH)), refused="train_batch_size"),
    Shape("a batch of two ranks, schedule left open", "MiuLab/FactAlign", of(batch(16, 1, 8),
        CLIP_AUTO, scale(enabled=True), warmup(total=A), zero(of(USUAL,
        stage3_gather_16bit_weights_on_model_save=A), SCATTER, offload_optimizer={"device":
        "none"}, offload_param={"device": "none"}), zero_allow_untested_optimizer=True),
        refused="train_batch_size"),
    Shape("quantized traffic", "IMOKURI/LLM-with-MLDE", of(TRAINER, scale(), BF16_AUTO,
        adamw(), warmup(), zero(USUAL, BOTH, zero_quantized_weights=True,
        zero_hpz_partition_size=16, zero_quantized_gradients=True)),
        refused="zero_optimization.zero_quantized_weights"),
    Shape("0/1 Adam", "the tutorial of DeepSpeed's 0/1 Adam", of(batch(), CLIP, BF16_AUTO,
        {"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 1e-3, "weight_decay": 0.01,
        "bias_correction": False, "var_freeze_step": 1000, "cuda_aware": False,
        "comm_backend_name": "nccl"}}}, zero(USUAL)), refused="optimizer.type"),
    Shape("a decay without an end", "suri-kunal/clef-mediqa-sum-2023", of(scale(enabled=True,
        auto_cast=False), {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.999]}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_type":
        "linear"}}}, zero(USUAL, BOTH, memory_efficient_linear=False)),
        refused="scheduler.params.total_num_steps"),
    Shape("a type that is none", "trainML/alpaca-llm-fine-tuning-example", of(TRAINER, scale(),
        BF16_AUTO, adamw(), warmup(), zero(USUAL, BOTH), communication_data_type="bfp16"),
        refused="communication_data_type"),
    Shape("plain, autocast", "SgtVincent/openpi-comet", of(batch(accum=None), CLIP, BF16,
        zero(OVERLAP, buckets(5e8, 5e7, 1e6), GATHER), torch_autocast={"enabled": True, "dtype":
        "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear", "torch.nn.Conv2d"]}),
        refused="torch_autocast.enabled"),
    Shape("states on NVMe", "rnaarla/hpc_pipeline", of(batch(8192, None, 16), FP16_ON,
        adamw(1.5e-4, [0.9, 0.95], 1e-8, None), zero(offload_optimizer={"device": "nvme",
        "nvme_path": "/local_nvme"}, offload_param={"device": "cpu"}), checkpoint={"enabled":
        True, "interval": 1000}), refused="zero_optimization.offload_optimizer.device"),
    Shape("a batch of four ranks", "dgitj/distributed-llm-training", of(batch(32, 2, 4), CLIP,
        BF16, adamw(2e-4, [0.9, 0.95], 1e-8, 0.1), warmup(2e-4, 20, 300, least=0), zero(OVERLAP,
        buckets(2e8, 1e8, 1e6), live(), GATHER), _comment="experiment B"),
        refused="train_batch_size"),
    Shape("fewer samples than ranks", "masa-ita/pytorch-parallelizm", of(batch(4, 1, None),
        FP16_ON, {"optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.999],
        "eps": 1e-8}}}, zero()), refused="train_batch_size"),
    Shape("fewer samples than micro-steps", "zhan1206/fusion-llm", of(batch(8, None, 16), CLIP,
        BF16, FP16_OFF, adamw(1e-5, [0.9, 0.95], 1e-8, 0.01), warmup(1e-5, 100, least=0),
        zero(USUAL, BOTH), RECOMPUTE), refused="train_batch_size"),
)
# fmt: on


def filled(config: Tree, world_size: int = 8) -> Tree:
    """Return what a Trainer fills in for a file of this shape, for a model of hidden size 64.

    As in a Trainer, the arguments of the run agree with what the file says of the batch.
    """
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    train, micro, accum = (config.get(name, A) for name in names)
    micro = 4 if micro == A else micro
    if accum == A:
        accum = 2 if train == A else train // (micro * world_size) or 1
    return {
        "train_batch_size": micro * accum * world_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accum,
        "gradient_clipping": 1.0,
        "bf16.enabled": True,
        "fp16.enabled": False,
        "optimizer.params.lr": 5e-5,
        "optimizer.params.betas": [0.9, 0.999],
        "optimizer.params.eps": 1e-8,
        "optimizer.params.weight_decay": 0.0,
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": 5e-5,
        "scheduler.params.warmup_num_steps": 10,
        "scheduler.params.total_num_steps": 1000,
        "zero_optimization.reduce_bucket_size": 64 * 64,
        "zero_optimization.stage3_prefetch_bucket_size": 64 * 64 * 9 // 10,
        "zero_optimization.stage3_param_persistence_threshold": 640,
    }
