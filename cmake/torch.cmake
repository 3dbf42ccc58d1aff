# LibTorch for snug's own build: snug::torch and what else find_torch.cmake gives, and
#   snug::fmt     the fmt that LibTorch ships, header-only, and nothing else of torch. Consumers never see it.
include(find_torch)
if(SNUG_TORCH_ERROR)
  message(FATAL_ERROR "${SNUG_TORCH_ERROR}")
endif()
# Whether C++ and the Python of script/setup have one LibTorch.
get_filename_component(torch_path "${SNUG_TORCH_ROOT}" REALPATH)
get_filename_component(venv_path "${SNUG_VENV}" REALPATH)
cmake_path(IS_PREFIX venv_path "${torch_path}" SNUG_TORCH_IS_OF_VENV)
message(STATUS "LibTorch ${SNUG_TORCH_VERSION} (CUDA: ${SNUG_TORCH_CUDA}): ${SNUG_TORCH_ROOT}")

# torch/include comes before /usr/include, so its fmt hides any other; header-only use needs no library of that version. The
# link shows fmt alone to files that must not see torch.
add_library(snug::fmt INTERFACE IMPORTED GLOBAL)
file(MAKE_DIRECTORY "${CMAKE_BINARY_DIR}/fmt")
file(CREATE_LINK "${SNUG_TORCH_ROOT}/include/fmt" "${CMAKE_BINARY_DIR}/fmt/fmt" SYMBOLIC)
target_include_directories(snug::fmt INTERFACE "${CMAKE_BINARY_DIR}/fmt")
target_compile_definitions(snug::fmt INTERFACE FMT_HEADER_ONLY)
