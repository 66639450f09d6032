list(APPEND HPKV_BIND keys.cc pool.cc store.cc copy.cc)
