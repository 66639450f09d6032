list(APPEND HPKV_BIND keys.cc pool.cc)
add_compile_definitions(HPKV_BIND_KEYS HPKV_BIND_POOL)
