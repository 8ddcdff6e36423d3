"""The process group, and models sharded over it: DeepSpeed, FSDP2, tensor and sequence parallelism."""
