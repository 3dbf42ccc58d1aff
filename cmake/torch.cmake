# Finds LibTorch and defines
#   snug::torch   headers and libraries, CUDA's where this LibTorch has them and they can be loaded
#   snug::fmt     the fmt that LibTorch ships, header-only, and nothing else of torch
# and sets SNUG_TORCH_ROOT, SNUG_TORCH_VERSION, SNUG_TORCH_LIB_DIR, SNUG_TORCH_CUDA and SNUG_CUDA_INCLUDE_DIR.
#
# Where it looks: Torch_DIR (the folder of TorchConfig.cmake, or the folder above lib/ and include/) as a CMake or environment
# variable; then the torch package of the project's own virtual environment; then that of the active Python.
#
# It does not call find_package(Torch). TorchConfig.cmake of a CUDA build demands nvcc and a CUDA toolkit, which host code does
# not need; it warns at every configure about libraries that are linked statically, adds three MKL directories that do not
# exist to every RUNPATH, and takes away the protobuf target. What remains of it is the four libraries named below. Their names
# have not changed since PyTorch 1.13. The file is installed with snug, so that consumers link exactly the same way.

include_guard(GLOBAL)

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
    message(FATAL_ERROR "Torch_DIR is ${named}, but there is no LibTorch: no include/ATen/ATen.h in it or three folders above.")
  endif()
  foreach(python IN ITEMS "${SNUG_VENV}/bin/python" "$ENV{VIRTUAL_ENV}/bin/python" python3)
    if(python STREQUAL "python3" OR EXISTS "${python}")
      _snug_torch_of_python("${python}" root)
      if(root AND EXISTS "${root}/include/ATen/ATen.h")
        set(${result} "${root}" PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
  message(FATAL_ERROR "LibTorch not found. Run script/setup, activate a Python environment that has torch, "
                      "or pass -DTorch_DIR=<libtorch>/share/cmake/Torch.")
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
set(SNUG_TORCH_LIB_DIR "${SNUG_TORCH_ROOT}/lib")

set(PACKAGE_FIND_VERSION)
include("${SNUG_TORCH_ROOT}/share/cmake/Torch/TorchConfigVersion.cmake" OPTIONAL)
set(SNUG_TORCH_VERSION "${PACKAGE_VERSION}")
if(SNUG_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "snug needs LibTorch 2.11 or later; ${SNUG_TORCH_ROOT} is version '${SNUG_TORCH_VERSION}'.")
endif()

foreach(name IN ITEMS c10 torch_cpu)
  if(NOT EXISTS "${SNUG_TORCH_LIB_DIR}/lib${name}.so")
    message(FATAL_ERROR "${SNUG_TORCH_LIB_DIR} has no lib${name}.so: snug needs the shared-library build of LibTorch.")
  endif()
  _snug_import_library(snug::torch_lib_${name} "${SNUG_TORCH_LIB_DIR}/lib${name}.so")
endforeach()
_snug_missing_libraries("${SNUG_TORCH_LIB_DIR}/libtorch_cpu.so" _snug_missing)
if(_snug_missing)
  message(FATAL_ERROR "${SNUG_TORCH_LIB_DIR}/libtorch_cpu.so cannot be loaded, for want of: ${_snug_missing}. "
                      "Was torch installed without the packages it depends on?")
endif()

set(_snug_torch_libraries snug::torch_lib_torch_cpu snug::torch_lib_c10)
set(SNUG_TORCH_CUDA OFF)
set(SNUG_CUDA_INCLUDE_DIR)
if(EXISTS "${SNUG_TORCH_LIB_DIR}/libtorch_cuda.so" AND EXISTS "${SNUG_TORCH_LIB_DIR}/libc10_cuda.so")
  _snug_missing_libraries("${SNUG_TORCH_LIB_DIR}/libtorch_cuda.so" _snug_missing)
  if(_snug_missing)
    message(STATUS "Torch's CUDA part is left out, for want of: ${_snug_missing}")
  else()
    set(SNUG_TORCH_CUDA ON)
    _snug_import_library(snug::torch_lib_c10_cuda "${SNUG_TORCH_LIB_DIR}/libc10_cuda.so")
    # Nothing refers to libtorch_cuda by name: its kernels register themselves when it is loaded, so the linker must keep it.
    list(APPEND _snug_torch_libraries
         "-Wl,--push-state,--no-as-needed,${SNUG_TORCH_LIB_DIR}/libtorch_cuda.so,--pop-state" snug::torch_lib_c10_cuda)
    # CUDA's headers come with the wheel's own packages or with a toolkit.
    file(GLOB _snug_cuda_wheels "${SNUG_TORCH_ROOT}/../nvidia/*/include")
    find_path(SNUG_CUDA_INCLUDE_DIR cuda_runtime_api.h HINTS ${_snug_cuda_wheels} ENV CUDA_HOME ENV CUDA_PATH
              PATHS /usr/local/cuda PATH_SUFFIXES include NO_CACHE)
  endif()
endif()

add_library(snug::torch INTERFACE IMPORTED GLOBAL)
# IMPORTED makes the include directories SYSTEM: torch's headers do not compile without warnings.
target_include_directories(snug::torch INTERFACE "${SNUG_TORCH_ROOT}/include"
                                                 "${SNUG_TORCH_ROOT}/include/torch/csrc/api/include")
target_compile_definitions(snug::torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO USE_RPC USE_TENSORPIPE)
target_compile_features(snug::torch INTERFACE cxx_std_20)
target_link_libraries(snug::torch INTERFACE ${_snug_torch_libraries})

# torch/include comes before /usr/include, so its fmt hides any other; header-only use needs no library of that version. The
# link shows fmt alone to files that must not see torch.
add_library(snug::fmt INTERFACE IMPORTED GLOBAL)
file(MAKE_DIRECTORY "${CMAKE_BINARY_DIR}/fmt")
file(CREATE_LINK "${SNUG_TORCH_ROOT}/include/fmt" "${CMAKE_BINARY_DIR}/fmt/fmt" SYMBOLIC)
target_include_directories(snug::fmt INTERFACE "${CMAKE_BINARY_DIR}/fmt")
target_compile_definitions(snug::fmt INTERFACE FMT_HEADER_ONLY)

message(STATUS "LibTorch ${SNUG_TORCH_VERSION} (CUDA: ${SNUG_TORCH_CUDA}): ${SNUG_TORCH_ROOT}")
