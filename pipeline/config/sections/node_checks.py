"""Schema of the section `launch.node_checks`: thresholds of the checks of nodes. No torch, no file access."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveFloat

from foundation.section import Count, Section


class NodeChecksSection(Section):
    """Checks of nodes before a start (`python -m pipeline.cluster.node_checks`): a busy laptop passes them."""

    timeout: PositiveFloat = Field(
        60.0, description="Seconds for all checks; a node that has not finished by then is a bad node, e.g. 120"
    )
    faults: Count = Field(3, description="Number of faults on a node after which it is left out, e.g. 3")
    slow_link: float = Field(
        0.25,
        gt=0.0,
        lt=1.0,
        description="A node is bad when its fastest link has less than this share of the median node's, e.g. 0.25",
    )
    min_bandwidth: PositiveFloat | None = Field(
        None,
        description="A node is bad when its fastest link is slower than this in MB/s, e.g. 1000 on 10 Gbit/s Ethernet;"
        " when absent, links are only compared with those of other nodes",
    )
    partners: Count = Field(
        16, description="Nodes with which each node's link is measured, e.g. 16; all where there are fewer"
    )
    payload_mb: Count = Field(64, description="MB sent over a link in each direction, for at most one second, e.g. 64")
    max_clock_skew: PositiveFloat = Field(
        5.0, description="A node is bad when its clock differs by more than this many seconds from all others, e.g. 5"
    )
    min_memory_gb: NonNegativeFloat = Field(
        0.25, description="A node is bad when its available host memory, in GB, is below this, e.g. 64"
    )
    min_shm_mb: NonNegativeFloat = Field(
        16.0,
        description="A node is bad when its free space in /dev/shm, in MB, is below this, e.g. 1024; NCCL needs it",
    )
    min_disk_gb: NonNegativeFloat = Field(
        0.25, description="A node is bad when its free space in the run's directory, in GB, is below this, e.g. 500"
    )
    min_tmp_gb: NonNegativeFloat = Field(
        0.1, description="A node is bad when its free space for temporary files, in GB, is below this, e.g. 10"
    )
    max_file_system_s: PositiveFloat = Field(
        20.0,
        description="A node is bad when 1 MB takes more seconds to be written, synced and read in the run's directory",
    )
