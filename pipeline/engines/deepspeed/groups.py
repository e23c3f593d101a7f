"""Process groups for DeepSpeed, with the interface of Megatron's model-parallel unit ("mpu").

DeepSpeed shards only over the data group (dp x cp). Its gradient norm counts tensor-parallel shards on every tp rank,
and all other parameters once.
"""

from __future__ import annotations

import torch.distributed as dist

from pipeline.engines.parallel.mesh import Mesh


class ModelParallelUnit:
    """This rank's groups. Building it is not collective: groups of one rank are created locally.

    Args:
        mesh: a mesh without pipeline parallelism; `PipelineModule` has its own unit.
    """

    def __init__(self, mesh: Mesh) -> None:
        assert mesh.size("pp") == 1
        alone = dist.new_group([mesh.rank], use_local_synchronization=True)
        self._data: dist.ProcessGroup = mesh.group("data") or alone
        self._tensor: dist.ProcessGroup = mesh.group("tp") or alone
        self._pipe: dist.ProcessGroup = alone

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Returns the data ranks, which have different tokens and the same parameters."""
        return self._data

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Returns the global ranks of the data ranks."""
        return dist.get_process_group_ranks(self._data)

    def get_data_parallel_world_size(self) -> int:
        """Returns the number of data ranks."""
        return dist.get_world_size(self._data)

    def get_data_parallel_rank(self) -> int:
        """Returns this rank's index among the data ranks."""
        return dist.get_rank(self._data)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """The ranks with different shards of the same parameters: without pipeline parallelism, the tp ranks."""
        return self._tensor

    def get_model_parallel_world_size(self) -> int:
        """Returns the number of model-parallel ranks."""
        return dist.get_world_size(self._tensor)

    def get_model_parallel_rank(self) -> int:
        """Returns this rank's index among the model-parallel ranks."""
        return dist.get_rank(self._tensor)

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        """Returns the tp ranks."""
        return self._tensor

    def get_tensor_model_parallel_world_size(self) -> int:
        """Returns the number of tp ranks."""
        return dist.get_world_size(self._tensor)

    def get_tensor_model_parallel_rank(self) -> int:
        """Returns this rank's index among the tp ranks."""
        return dist.get_rank(self._tensor)

    def get_pipe_parallel_group(self) -> dist.ProcessGroup:
        """Returns the group of this rank alone."""
        return self._pipe

    def get_pipe_parallel_world_size(self) -> int:
        """Returns the number of pipeline stages: one."""
        return 1

    def get_pipe_parallel_rank(self) -> int:
        """Returns the index of the only stage."""
        return 0
