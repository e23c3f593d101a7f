"""The process groups that DeepSpeed asks for, in the form in which it asks: Megatron's model-parallel unit ("mpu").

DeepSpeed shards over the data group (dp x cp) only, and its gradient norm counts parameters that tensor parallelism cut
on every tp rank and the others once.
"""

from __future__ import annotations

import torch.distributed as dist

from pipeline.parallel.mesh import Mesh


class ParallelUnit:
    """This rank's groups. Building it is local: groups of one rank are made where they are needed.

    Args:
        mesh: without pipeline stages; `PipelineModule` brings its own unit.
    """

    def __init__(self, mesh: Mesh) -> None:
        assert mesh.size("pp") == 1
        alone = dist.new_group([mesh.rank], use_local_synchronization=True)
        self._data: dist.ProcessGroup = mesh.group("data") or alone
        self._tensor: dist.ProcessGroup = mesh.group("tp") or alone
        self._pipe: dist.ProcessGroup = alone

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that see different tokens and hold the same parameters."""
        return self._data

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Their global ranks."""
        return dist.get_process_group_ranks(self._data)

    def get_data_parallel_world_size(self) -> int:
        """How many they are."""
        return dist.get_world_size(self._data)

    def get_data_parallel_rank(self) -> int:
        """This rank's place among them."""
        return dist.get_rank(self._data)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that hold different parts of the same parameters, whatever cut them."""
        return self._tensor

    def get_model_parallel_world_size(self) -> int:
        """How many they are."""
        return dist.get_world_size(self._tensor)

    def get_model_parallel_rank(self) -> int:
        """This rank's place among them."""
        return dist.get_rank(self._tensor)

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        """The tp ranks."""
        return self._tensor

    def get_tensor_model_parallel_world_size(self) -> int:
        """How many they are."""
        return dist.get_world_size(self._tensor)

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's place among them."""
        return dist.get_rank(self._tensor)

    def get_pipe_parallel_group(self) -> dist.ProcessGroup:
        """This rank alone."""
        return self._pipe

    def get_pipe_parallel_world_size(self) -> int:
        """One stage."""
        return 1

    def get_pipe_parallel_rank(self) -> int:
        """The only stage."""
        return 0
