"""Names of torch.distributed."""

from __future__ import annotations

from torchloom._torch.table.records import PrivateName, each

_NO_RANKS = "runs on several ranks fail as they meet"
_NO_DCP = "checkpoints in DCP's format are neither written nor read"

DISTRIBUTED = (
    *each(
        "torch.distributed.distributed_c10d",
        "AllgatherOptions AllreduceCoalescedOptions ReduceScatterOptions",
        "begin a collective on several tensors",
        "`import torchloom.runtime` fails",
    ),
    *each(
        "torch.distributed.distributed_c10d",
        "_get_default_store _get_process_group_store",
        "let ranks compare facts without a collective",
        _NO_RANKS,
    ),
    *each(
        "torch.distributed.ProcessGroup",
        "_get_backend _device_types",
        "know a group's timeout, and whether it coalesces",
        _NO_RANKS,
    ),
    PrivateName(
        name="torch._C._distributed_c10d.Backend.Options._timeout",
        used_for="know how long a collective may take",
        without=_NO_RANKS,
    ),
    PrivateName(
        name="torch.distributed.all_gather_single",
        used_for="gather one tensor",
        without="the older name is used",
        since="2.13",
        is_needed=False,
        instead="torch.distributed.all_gather_into_tensor",
    ),
    PrivateName(
        name="torch.distributed.all_gather_into_tensor",
        used_for="gather one tensor",
        without="gathers fail",
        is_needed=False,
        instead="torch.distributed.all_gather_single",
    ),
    PrivateName(
        name="torch.distributed.reduce_scatter_single",
        used_for="sum one tensor into shards",
        without="the older name is used",
        since="2.13",
        is_needed=False,
        instead="torch.distributed.reduce_scatter_tensor",
    ),
    PrivateName(
        name="torch.distributed.reduce_scatter_tensor",
        used_for="sum one tensor into shards",
        without="reductions fail",
        is_needed=False,
        instead="torch.distributed.reduce_scatter_single",
    ),
    PrivateName(
        name="torch.distributed.ProcessGroup.all_gather_single_coalesced",
        used_for="gather several tensors by one collective",
        without="the older name is used",
        since="2.13",
        is_needed=False,
        instead="torch.distributed.ProcessGroup.allgather_into_tensor_coalesced",
    ),
    PrivateName(
        name="torch.distributed.ProcessGroup.allgather_into_tensor_coalesced",
        used_for="gather several tensors by one collective",
        without="gathers over native backends fail",
        is_needed=False,
        instead="torch.distributed.ProcessGroup.all_gather_single_coalesced",
    ),
    PrivateName(
        name="torch.distributed.ProcessGroup.reduce_scatter_single_coalesced",
        used_for="sum several tensors into shards by one collective",
        without="the older name is used",
        since="2.13",
        is_needed=False,
        instead="torch.distributed.ProcessGroup.reduce_scatter_tensor_coalesced",
    ),
    PrivateName(
        name="torch.distributed.ProcessGroup.reduce_scatter_tensor_coalesced",
        used_for="sum several tensors into shards by one collective",
        without="reductions over native backends fail",
        is_needed=False,
        instead="torch.distributed.ProcessGroup.reduce_scatter_single_coalesced",
    ),
    *each(
        "torch.distributed.checkpoint.metadata",
        "ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties TensorStorageMetadata",
        "write the metadata file of a checkpoint",
        _NO_DCP,
    ),
    PrivateName(
        name="torch.distributed.checkpoint.state_dict_saver:storage_writer",
        used_for="refuse a writer that keeps one part of a tensor in each file",
        without="HuggingFaceStorageWriter writes parts of shards alone, without an error",
        is_needed=False,
    ),
    PrivateName(
        name="torch.distributed.checkpoint.filesystem._StorageInfo",
        used_for="say where a tensor is in a checkpoint",
        without=_NO_DCP,
    ),
)
