list(APPEND HPKV_COPY
  copy/extents.cc
  copy/layout.cc
  copy/source.cc
  copy/ticket.cc
  copy/cpu/copies.cc
  copy/cpu/engine.cc)
