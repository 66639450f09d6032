list(APPEND HPKV_COPY
  copy/extents.cc
  copy/layout.cc
  copy/source.cc
  copy/ticket.cc
  copy/cpu/copies.cc
  copy/cpu/engine.cc
  copy/stream/copy_stream.cc
  copy/stream/core.cc
  copy/stream/engine.cc
  copy/stream/index_reader.cc
  copy/stream/load_batch.cc
  copy/stream/loads.cc
  copy/stream/registered_pool.cc
  copy/stream/spills.cc
  copy/stream/staging.cc
  copy/stream/transfer.cc
  copy/stream/verifies.cc)
