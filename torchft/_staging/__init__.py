"""What ``torchft/local_sgd.py`` stands on, in the words that all modules of this folder use.

- **rank**: one process of a replica group. **replica group**: the ranks that share one copy of the model, one
  FSDP or DDP island; LocalSGD averages across groups.
- **local shard**: what this rank holds of a parameter: the local tensor of a DTensor, the parameter itself
  otherwise. **S**: bytes of all local shards of this rank. **M**: bytes of the largest one.
- **release path**: what LocalSGD of the release does, and ours with the option off. **staged path**: ours
  with it on.
- **window**: the accelerator memory of one synchronization, one allocation per device, through which all
  local shards of that device pass.
  **host all-reduce**: reducing the host copies themselves, without a window.
- **staged**: reduced and on the host, waiting for the commit vote. **write-back**: host to parameter after
  it.
"""
