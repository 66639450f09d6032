# Until every part has landed, a part switches itself on here:
#   list(APPEND HPKV_BIND pool.cc)
#   add_compile_definitions(HPKV_BIND_POOL)
