list(APPEND HPKV_INDEX
  index/disk_shard.cc
  index/shard.cc
  index/table.cc)
