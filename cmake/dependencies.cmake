# Libraries besides LibTorch: an installed package first, else its sources at a pinned commit. The pins are the versions of
# Debian 12, so that both ways build the same code.
include(FetchContent)

set(JSON_BuildTests OFF)
set(CLI11_BUILD_TESTS OFF)
set(CLI11_BUILD_EXAMPLES OFF)
set(INSTALL_GTEST OFF)
# Highway takes no others than cached ones.
foreach(part IN ITEMS CONTRIB EXAMPLES INSTALL TESTS)
  set(HWY_ENABLE_${part} OFF CACHE INTERNAL "")
endforeach()

FetchContent_Declare(nlohmann_json SYSTEM
  GIT_REPOSITORY https://github.com/nlohmann/json.git
  GIT_TAG bc889afb4c5bf1c0d8ee29ef35eaaf4c8bef8a5d # v3.11.2
  FIND_PACKAGE_ARGS 3.11 CONFIG)
FetchContent_Declare(highway SYSTEM
  GIT_REPOSITORY https://github.com/google/highway.git
  GIT_TAG 58746ca5b9f9444a2a3549704602ecc6239f8f41 # 1.0.3
  FIND_PACKAGE_ARGS 1.0.3 NAMES hwy CONFIG)
FetchContent_Declare(CLI11 SYSTEM
  GIT_REPOSITORY https://github.com/CLIUtils/CLI11.git
  GIT_TAG 70f8072f9dd2292fd0b9f9e5f58e279f60483ed3 # v2.1.2
  FIND_PACKAGE_ARGS 2.1 CONFIG)
FetchContent_Declare(googletest SYSTEM
  GIT_REPOSITORY https://github.com/google/googletest.git
  GIT_TAG 58d77fa8070e8cec2dc1ed015d66b454c8d78850 # 1.12.1
  FIND_PACKAGE_ARGS 1.12 NAMES GTest CONFIG)
FetchContent_MakeAvailable(nlohmann_json highway)
if(NOT TARGET hwy::hwy)
  add_library(hwy::hwy ALIAS hwy)
endif()
if(SNUG_BUILD_CLI AND NOT SNUG_TORCH_FREE_ONLY)
  FetchContent_MakeAvailable(CLI11)
endif()
if(SNUG_BUILD_TESTS)
  FetchContent_MakeAvailable(googletest)
endif()
find_package(ZLIB REQUIRED)
