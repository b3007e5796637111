# find_package(tensorizer) makes the target tensorizer::tensorizer.
#
# It needs torch: the targets of an earlier find_package(Torch), else the folder TENSORIZER_TORCH,
# else a folder of CMAKE_PREFIX_PATH (pip's torch, its share/cmake, or a libtorch archive), else
# the torch that is installed beside this package. CUDA's toolkit is not needed for any of them,
# where find_package(Torch) asks for it.
cmake_minimum_required(VERSION 3.18)

get_filename_component(_tensorizer_root "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
set(tensorizer_FOUND FALSE)

if(TARGET torch)
  set(_tensorizer_torch torch)
else()
  foreach(_folder "${TENSORIZER_TORCH}" ${CMAKE_PREFIX_PATH} "${_tensorizer_root}/../torch")
    foreach(_candidate "${_folder}" "${_folder}/../..")
      if(NOT _tensorizer_torch_root AND EXISTS "${_candidate}/lib/libtorch_cpu.so")
        get_filename_component(_tensorizer_torch_root "${_candidate}" ABSOLUTE)
      endif()
    endforeach()
  endforeach()
  if(NOT _tensorizer_torch_root)
    set(tensorizer_NOT_FOUND_MESSAGE
        "torch was not found: set TENSORIZER_TORCH to its folder, which holds include and lib")
    return()
  endif()
  if(NOT TARGET tensorizer::torch)
    add_library(tensorizer::torch INTERFACE IMPORTED)
    set(_tensorizer_include "${_tensorizer_torch_root}/include")
    set(_tensorizer_lib "${_tensorizer_torch_root}/lib")
    target_include_directories(tensorizer::torch SYSTEM INTERFACE
      "${_tensorizer_include}" "${_tensorizer_include}/torch/csrc/api/include")
    target_compile_definitions(tensorizer::torch INTERFACE _GLIBCXX_USE_CXX11_ABI=1)
    # libtorch.so brings what the build of torch has, CUDA included, and nothing calls it directly.
    target_link_libraries(tensorizer::torch INTERFACE
      -Wl,--no-as-needed "${_tensorizer_lib}/libtorch.so" -Wl,--as-needed
      "${_tensorizer_lib}/libtorch_cpu.so" "${_tensorizer_lib}/libc10.so")
  endif()
  set(_tensorizer_torch tensorizer::torch)
endif()

if(NOT TARGET tensorizer::tensorizer)
  add_library(tensorizer::tensorizer SHARED IMPORTED)
  set_target_properties(tensorizer::tensorizer PROPERTIES
    IMPORTED_LOCATION "${_tensorizer_root}/lib/libtensorizer_torch.so"
    IMPORTED_SONAME libtensorizer_torch.so
    INTERFACE_INCLUDE_DIRECTORIES "${_tensorizer_root}/include"
    INTERFACE_LINK_LIBRARIES "${_tensorizer_torch}")
  # What the headers of the newest torch ask for.
  target_compile_features(tensorizer::tensorizer INTERFACE cxx_std_20)
endif()
set(tensorizer_FOUND TRUE)
