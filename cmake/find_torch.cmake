# Finds LibTorch and defines
#   snug::torch   headers and libraries, CUDA's where this LibTorch has them and they can be loaded
# and sets SNUG_TORCH_ROOT, SNUG_TORCH_VERSION, SNUG_TORCH_LIB_DIR, SNUG_TORCH_CUDA and SNUG_CUDA_INCLUDE_DIR; or, where there is no
# LibTorch that will do, SNUG_TORCH_ERROR, which says why. The file is installed with snug, so that consumers link as snug does.
#
# Where it looks: Torch_DIR (the folder of TorchConfig.cmake, or the folder above lib/ and include/) as a CMake or environment
# variable; then CMAKE_PREFIX_PATH, likewise; then, for an installed snug, the LibTorch that it was built with; then the torch
# package of the project's own virtual environment; then that of the active Python.
#
# An installed snug sets SNUG_BUILT_WITH_ROOT, _VERSION and _CUDA before: LibTorch keeps no binary interface from one version to
# the next, so another version would crash, not fail to link.
#
# It does not call find_package(Torch). TorchConfig.cmake of a CUDA build demands nvcc and a CUDA toolkit, which host code does
# not need; it warns at every configure about libraries that are linked statically, adds three MKL directories that do not
# exist to every RUNPATH, and takes away the protobuf target. What remains of it is the four libraries named below. Their names
# have not changed since PyTorch 1.13.

set(SNUG_TORCH_ERROR)
# A second find_package in another folder: the targets are global.
if(TARGET snug::torch)
  return()
endif()

# Asks a Python where its torch is, without importing it (which would take seconds and needs all of torch's Python packages).
function(_snug_torch_of_python python result)
  execute_process(
    COMMAND "${python}" -c
            "import importlib.util as u, os; s = u.find_spec('torch'); print(os.path.dirname(s.origin) if s and s.origin else '')"
    OUTPUT_VARIABLE root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(${result} "${root}" PARENT_SCOPE)
endfunction()

function(_snug_find_torch_root result)
  set(named "${Torch_DIR}")
  if(NOT named)
    set(named "$ENV{Torch_DIR}")
  endif()
  if(named)
    foreach(candidate IN ITEMS "${named}" "${named}/../../.." "${named}/libtorch")
      if(EXISTS "${candidate}/include/ATen/ATen.h")
        get_filename_component(root "${candidate}" ABSOLUTE)
        set(${result} "${root}" PARENT_SCOPE)
        return()
      endif()
    endforeach()
    # What was named is taken or refused, never passed over.
    set(SNUG_TORCH_ERROR
        "Torch_DIR is ${named}, but there is no LibTorch: no include/ATen/ATen.h in it or three folders above." PARENT_SCOPE)
    return()
  endif()
  string(REPLACE ":" ";" prefixes "$ENV{CMAKE_PREFIX_PATH}")
  foreach(prefix IN LISTS CMAKE_PREFIX_PATH prefixes SNUG_BUILT_WITH_ROOT)
    # Python's torch.utils.cmake_prefix_path is share/cmake.
    if(EXISTS "${prefix}/Torch/TorchConfigVersion.cmake")
      set(prefix "${prefix}/../..")
    endif()
    if(EXISTS "${prefix}/share/cmake/Torch/TorchConfigVersion.cmake" AND EXISTS "${prefix}/include/ATen/ATen.h")
      get_filename_component(root "${prefix}" ABSOLUTE)
      set(${result} "${root}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(pythons python3)
  foreach(venv IN ITEMS "$ENV{VIRTUAL_ENV}" "${SNUG_VENV}")
    if(venv AND EXISTS "${venv}/bin/python")
      list(PREPEND pythons "${venv}/bin/python")
    endif()
  endforeach()
  foreach(python IN LISTS pythons)
    _snug_torch_of_python("${python}" root)
    if(root AND EXISTS "${root}/include/ATen/ATen.h")
      set(${result} "${root}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  if(SNUG_BUILT_WITH_ROOT)
    string(CONCAT error "LibTorch not found: it is no longer at ${SNUG_BUILT_WITH_ROOT}, where it was when snug was built. Pass "
                        "-DTorch_DIR=<LibTorch ${SNUG_BUILT_WITH_VERSION}>/share/cmake/Torch.")
  else()
    string(CONCAT error "LibTorch not found. Run script/setup, activate a Python environment that has torch, or pass "
                        "-DTorch_DIR=<libtorch>/share/cmake/Torch.")
  endif()
  set(SNUG_TORCH_ERROR "${error}" PARENT_SCOPE)
endfunction()

# What a shared library needs and the loader cannot find. The driver's libcuda is left out: a build machine may lack it.
function(_snug_missing_libraries library result)
  execute_process(COMMAND ldd "${library}" OUTPUT_VARIABLE output ERROR_QUIET)
  string(REGEX MATCHALL "[^\n\t ]+ => not found" missing "${output}")
  list(TRANSFORM missing REPLACE " => not found" "")
  list(FILTER missing EXCLUDE REGEX "^libcuda\\.so|^libnvidia-ml\\.so")
  list(REMOVE_DUPLICATES missing)
  set(${result} "${missing}" PARENT_SCOPE)
endfunction()

function(_snug_import_library target location)
  add_library(${target} SHARED IMPORTED GLOBAL)
  set_target_properties(${target} PROPERTIES IMPORTED_LOCATION "${location}")
endfunction()

_snug_find_torch_root(SNUG_TORCH_ROOT)
if(SNUG_TORCH_ERROR)
  return()
endif()
set(SNUG_TORCH_LIB_DIR "${SNUG_TORCH_ROOT}/lib")

# In a function, for the file sets variables that find_package(snug) uses as well.
function(_snug_read_torch_version result)
  set(PACKAGE_VERSION)
  set(PACKAGE_FIND_VERSION)
  include("${SNUG_TORCH_ROOT}/share/cmake/Torch/TorchConfigVersion.cmake" OPTIONAL)
  # What follows a plus sign says how it was built, as in 2.13.0+cpu.
  string(REGEX REPLACE "\\+.*" "" version "${PACKAGE_VERSION}")
  set(${result} "${version}" PARENT_SCOPE)
endfunction()

_snug_read_torch_version(SNUG_TORCH_VERSION)
if(SNUG_BUILT_WITH_VERSION AND NOT SNUG_TORCH_VERSION STREQUAL SNUG_BUILT_WITH_VERSION)
  string(CONCAT SNUG_TORCH_ERROR
         "snug was built with LibTorch ${SNUG_BUILT_WITH_VERSION}, but ${SNUG_TORCH_ROOT} is version '${SNUG_TORCH_VERSION}', and "
         "LibTorch's versions do not mix. Pass -DTorch_DIR=<LibTorch ${SNUG_BUILT_WITH_VERSION}>/share/cmake/Torch, or build snug "
         "again with this one.")
  return()
endif()
if(SNUG_TORCH_VERSION VERSION_LESS 2.11)
  set(SNUG_TORCH_ERROR "snug needs LibTorch 2.11 or later; ${SNUG_TORCH_ROOT} is version '${SNUG_TORCH_VERSION}'.")
  return()
endif()

foreach(name IN ITEMS c10 torch_cpu)
  if(NOT EXISTS "${SNUG_TORCH_LIB_DIR}/lib${name}.so")
    set(SNUG_TORCH_ERROR "${SNUG_TORCH_LIB_DIR} has no lib${name}.so: snug needs the shared-library build of LibTorch.")
    return()
  endif()
endforeach()
_snug_missing_libraries("${SNUG_TORCH_LIB_DIR}/libtorch_cpu.so" _snug_missing)
if(_snug_missing)
  string(CONCAT SNUG_TORCH_ERROR "${SNUG_TORCH_LIB_DIR}/libtorch_cpu.so cannot be loaded, for want of: ${_snug_missing}. "
                                 "Was torch installed without the packages it depends on?")
  return()
endif()

set(SNUG_TORCH_CUDA OFF)
set(SNUG_CUDA_INCLUDE_DIR)
if(EXISTS "${SNUG_TORCH_LIB_DIR}/libtorch_cuda.so" AND EXISTS "${SNUG_TORCH_LIB_DIR}/libc10_cuda.so")
  _snug_missing_libraries("${SNUG_TORCH_LIB_DIR}/libtorch_cuda.so" _snug_missing)
  if(_snug_missing)
    message(STATUS "Torch's CUDA part is left out, for want of: ${_snug_missing}")
  else()
    set(SNUG_TORCH_CUDA ON)
  endif()
endif()
if(SNUG_BUILT_WITH_CUDA AND NOT SNUG_TORCH_CUDA)
  string(CONCAT SNUG_TORCH_ERROR "snug was built with a CUDA build of LibTorch, but ${SNUG_TORCH_ROOT} is none, or its CUDA part "
                                 "cannot be loaded. Pass -DTorch_DIR=<a CUDA build of LibTorch>/share/cmake/Torch.")
  return()
endif()

_snug_import_library(snug::torch_lib_c10 "${SNUG_TORCH_LIB_DIR}/libc10.so")
_snug_import_library(snug::torch_lib_torch_cpu "${SNUG_TORCH_LIB_DIR}/libtorch_cpu.so")
set(_snug_torch_libraries snug::torch_lib_torch_cpu snug::torch_lib_c10)
if(SNUG_TORCH_CUDA)
  _snug_import_library(snug::torch_lib_c10_cuda "${SNUG_TORCH_LIB_DIR}/libc10_cuda.so")
  # Nothing refers to libtorch_cuda by name: its kernels register themselves when it is loaded, so the linker must keep it.
  list(APPEND _snug_torch_libraries
       "-Wl,--push-state,--no-as-needed,${SNUG_TORCH_LIB_DIR}/libtorch_cuda.so,--pop-state" snug::torch_lib_c10_cuda)
  # CUDA's headers come with the wheel's own packages or with a toolkit.
  file(GLOB _snug_cuda_wheels "${SNUG_TORCH_ROOT}/../nvidia/*/include")
  foreach(_snug_header IN ITEMS cuda_runtime_api.h crt/host_config.h)
    unset(_snug_folder)
    find_path(_snug_folder ${_snug_header} HINTS ${_snug_cuda_wheels} ENV CUDA_HOME ENV CUDA_PATH
              PATHS /usr/local/cuda PATH_SUFFIXES include NO_CACHE)
    if(NOT _snug_folder)
      message(STATUS "CUDA's headers are left out: no ${_snug_header}. A toolkit has it, and PyPI's nvidia-cuda-crt in the version of nvidia-cuda-runtime")
      set(SNUG_CUDA_INCLUDE_DIR)
      break()
    endif()
    list(APPEND SNUG_CUDA_INCLUDE_DIR "${_snug_folder}")
  endforeach()
  list(REMOVE_DUPLICATES SNUG_CUDA_INCLUDE_DIR)
endif()

add_library(snug::torch INTERFACE IMPORTED GLOBAL)
# IMPORTED makes the include directories SYSTEM: torch's headers do not compile without warnings.
target_include_directories(snug::torch INTERFACE "${SNUG_TORCH_ROOT}/include"
                                                 "${SNUG_TORCH_ROOT}/include/torch/csrc/api/include")
target_compile_definitions(snug::torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO USE_RPC USE_TENSORPIPE)
target_compile_features(snug::torch INTERFACE cxx_std_20)
target_link_libraries(snug::torch INTERFACE ${_snug_torch_libraries})
