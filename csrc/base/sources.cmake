list(APPEND HPKV_BASE
  base/crc32c.cc
  base/crc32c_x86.cc
  base/error.cc
  base/key.cc)
