# hpkv_cuda: the device of the stream engine on NVIDIA GPUs, or what stands in its place without a
# CUDA compiler. Only the Python module needs it; C++ tests run on a device of threads.
set(HPKV_CUDA "AUTO" CACHE STRING "AUTO: the CUDA engine if nvcc is found; ON: an error if not; OFF")
set_property(CACHE HPKV_CUDA PROPERTY STRINGS AUTO ON OFF)
set(HPKV_CUDA_ARCHITECTURES "" CACHE STRING
    "as CMAKE_CUDA_ARCHITECTURES; empty: sm_80, sm_90, sm_100 and PTX for later ones")

# Why there can be no CUDA engine; empty where there can. C++20 came with nvcc 12.
function(hpkv_no_cuda_because out)
  set(reason "")
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(reason "there is no nvcc that works: neither the one that CUDACXX names ('$ENV{CUDACXX}') nor one in PATH ($ENV{PATH})")
  else()
    execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE said)
    if(said MATCHES "release ([0-9.]+)" AND CMAKE_MATCH_1 VERSION_LESS 12.0)
      set(reason "${CMAKE_CUDA_COMPILER} is nvcc ${CMAKE_MATCH_1}, and 12.0 is the oldest that compiles it")
    endif()
  endif()
  set(${out} "${reason}" PARENT_SCOPE)
endfunction()

set(hpkv_with_cuda OFF)
include(CheckLanguage)
if(HPKV_CUDA AND (NOT HPKV_CUDA STREQUAL "AUTO" OR (SKBUILD AND NOT HPKV_TESTS)))
  hpkv_no_cuda_because(hpkv_reason)
  if(NOT hpkv_reason)
    set(hpkv_with_cuda ON)
  elseif(HPKV_CUDA STREQUAL "AUTO")
    message(STATUS "hpkv: no CUDA engine: ${hpkv_reason}")
  else()
    message(FATAL_ERROR "HPKV_CUDA is ${HPKV_CUDA}, and ${hpkv_reason}. Install the CUDA toolkit, or "
        "build with HPKV_CUDA=OFF.")
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
target_compile_options(hpkv_cuda PRIVATE -Xcompiler=-Wall,-Wextra,-Wconversion,-Wshadow)
if(HPKV_WERROR)
  target_compile_options(hpkv_cuda PRIVATE --Werror=all-warnings -Xcompiler=-Werror)
endif()
