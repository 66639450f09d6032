list(APPEND HPKV_DISK
  disk/catalog.cc
  disk/catalog_survey.cc
  disk/context.cc
  disk/directory.cc
  disk/evictor.cc
  disk/namespace_files.cc
  disk/reader.cc
  disk/record_io.cc
  disk/recovery.cc
  disk/region_files.cc
  disk/region_store.cc
  disk/small_file.cc
  disk/store_lock.cc
  disk/summary.cc
  disk/system_files.cc
  disk/writer.cc
  disk/writer_regions.cc)
