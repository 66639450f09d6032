# The CUDA device of the stream engine, compiled for what servers run on and as PTX for what comes.
# Nothing links it yet.
option(HPKV_CUDA "compile the CUDA device of the copy engine; needs nvcc" OFF)
if(HPKV_CUDA)
  enable_language(CUDA)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)  # CMake before 3.25.2 does not know it
  endif()
  add_library(hpkv_cuda OBJECT ${CMAKE_CURRENT_LIST_DIR}/device.cu)
  target_include_directories(hpkv_cuda PRIVATE ${CMAKE_CURRENT_LIST_DIR}/../..)
  set_target_properties(hpkv_cuda PROPERTIES
      CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON
      CUDA_ARCHITECTURES "80-real;90-real;100-real;100-virtual")
  target_compile_options(hpkv_cuda PRIVATE --Werror=all-warnings
      -Xcompiler=-Wall,-Wextra,-Wconversion,-Wshadow,-Werror)
endif()
