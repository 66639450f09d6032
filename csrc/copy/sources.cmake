list(APPEND HPKV_COPY
  copy/layout.cc
  copy/ticket.cc
  copy/cpu/copies.cc
  copy/cpu/engine.cc)
