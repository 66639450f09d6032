list(APPEND HPKV_INDEX
  index/shard.cc)
