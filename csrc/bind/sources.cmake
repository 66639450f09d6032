list(APPEND HPKV_BIND keys.cc pool.cc copy.cc)
