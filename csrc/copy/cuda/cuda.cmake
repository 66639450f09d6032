# hpkv_cuda: the device of the stream engine on NVIDIA GPUs, or what stands in its place without a
# CUDA compiler. Only the Python module needs it; C++ tests run on a device of threads.
set(HPKV_CUDA "AUTO" CACHE STRING "AUTO: the CUDA engine if nvcc is found; ON: an error if not; OFF")
set_property(CACHE HPKV_CUDA PROPERTY STRINGS AUTO ON OFF)
set(HPKV_CUDA_ARCHITECTURES "" CACHE STRING
    "as CMAKE_CUDA_ARCHITECTURES; empty: sm_80, sm_90, sm_100 and PTX for later ones")

set(hpkv_with_cuda OFF)
include(CheckLanguage)
if(HPKV_CUDA STREQUAL "AUTO")
  if(SKBUILD AND NOT HPKV_TESTS)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      set(hpkv_with_cuda ON)
    else()
      message(STATUS "hpkv: no CUDA engine, for there is no nvcc that works (CUDACXX, PATH)")
    endif()
  endif()
elseif(HPKV_CUDA)
  set(hpkv_with_cuda ON)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR "HPKV_CUDA is ${HPKV_CUDA}, and no CUDA compiler works. Looked for: the one "
        "that CUDACXX names ('$ENV{CUDACXX}'), nvcc in PATH ($ENV{PATH}). Install the CUDA toolkit, "
        "or build with HPKV_CUDA=OFF.")
  endif()
endif()

if(NOT hpkv_with_cuda)
  if(SKBUILD)
    add_library(hpkv_cuda STATIC copy/cuda/absent.cc)
    target_link_libraries(hpkv_cuda PRIVATE hpkv_core)
  endif()
  return()
endif()

enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)  # CMake before 3.25.2 does not know it
endif()
set(hpkv_architectures ${HPKV_CUDA_ARCHITECTURES})
if(NOT hpkv_architectures)
  set(hpkv_architectures 80-real 90-real 100-real 100-virtual)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
    set(hpkv_architectures 80-real 90-real 90-virtual)  # sm_100 came with 12.8
  endif()
endif()
message(STATUS "hpkv: CUDA engine by nvcc ${CMAKE_CUDA_COMPILER_VERSION} for ${hpkv_architectures}")
add_library(hpkv_cuda STATIC copy/cuda/device.cu)
target_include_directories(hpkv_cuda PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
# The runtime goes into the module: it is imported where there is no driver too, and another runtime
# that the process has loaded does not get into its way.
set_target_properties(hpkv_cuda PROPERTIES
    CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_VISIBILITY_PRESET hidden
    CUDA_RUNTIME_LIBRARY Static CUDA_ARCHITECTURES "${hpkv_architectures}")
target_compile_options(hpkv_cuda PRIVATE --Werror=all-warnings
    -Xcompiler=-Wall,-Wextra,-Wconversion,-Wshadow,-Werror)
