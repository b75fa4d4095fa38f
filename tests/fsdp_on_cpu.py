"""
Runs a script with its model sharded by FSDP on CPUs. accelerate shards models on accelerators only; all that it does
then, and torch, run on CPUs, too.
"""

import runpy
import sys
from pathlib import Path

from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def shard(self, *args, **kwargs):
    initialize(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = FullyShardedDataParallelPlugin()
        assert self.is_fsdp2


initialize, AcceleratorState.__init__ = AcceleratorState.__init__, shard
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))  # as for any script
runpy.run_path(sys.argv[0], run_name="__main__")
