"""The format of checkpoint shards and their metadata, readable by torch.distributed.checkpoint."""
