list(APPEND HPKV_DISK
  disk/catalog.cc
  disk/catalog_survey.cc)
