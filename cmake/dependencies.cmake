# Libraries besides LibTorch: an installed package first, else its sources, pinned. The pins are the versions of Debian 12, so that both
# ways build the same code. The libraries that the Python package needs come as archives: pip's CMake fetches these without git.
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
  URL https://github.com/nlohmann/json/releases/download/v3.11.2/json.tar.xz
  URL_HASH SHA256=8c4b26bf4b422252e13f332bc5e388ec0ab5c3443d24399acb675e68278d341f
  FIND_PACKAGE_ARGS 3.11 CONFIG)
FetchContent_Declare(highway SYSTEM
  URL https://github.com/google/highway/archive/refs/tags/1.0.3.tar.gz
  URL_HASH SHA256=566fc77315878473d9a6bd815f7de78c73734acdcb745c3dde8579560ac5440e
  FIND_PACKAGE_ARGS 1.0.3 NAMES hwy CONFIG)
# Without its own CMakeLists.txt, which builds and installs more than the checksum that snug needs.
FetchContent_Declare(ZLIB SYSTEM
  URL https://github.com/madler/zlib/releases/download/v1.2.13/zlib-1.2.13.tar.xz
  URL_HASH SHA256=d14c38e313afc35a9a8760dadf26042f51ea0f5d154b0630a31da0540107fb98
  SOURCE_SUBDIR no_folder
  FIND_PACKAGE_ARGS 1.2)
FetchContent_Declare(CLI11 SYSTEM
  GIT_REPOSITORY https://github.com/CLIUtils/CLI11.git
  GIT_TAG 70f8072f9dd2292fd0b9f9e5f58e279f60483ed3 # v2.1.2
  FIND_PACKAGE_ARGS 2.1 CONFIG)
FetchContent_Declare(googletest SYSTEM
  GIT_REPOSITORY https://github.com/google/googletest.git
  GIT_TAG 58d77fa8070e8cec2dc1ed015d66b454c8d78850 # 1.12.1
  FIND_PACKAGE_ARGS 1.12 NAMES GTest CONFIG)
set(CMAKE_POLICY_VERSION_MINIMUM 3.10)  # CMake 4 refuses the least version that json's CMakeLists.txt names
FetchContent_MakeAvailable(nlohmann_json highway ZLIB)
if(NOT TARGET hwy::hwy)
  add_library(hwy::hwy ALIAS hwy)
endif()
if(NOT TARGET ZLIB::ZLIB)
  enable_language(C)
  add_library(zlib_checksum STATIC "${zlib_SOURCE_DIR}/crc32.c")
  target_include_directories(zlib_checksum SYSTEM PUBLIC "${zlib_SOURCE_DIR}")
  set_target_properties(zlib_checksum PROPERTIES POSITION_INDEPENDENT_CODE ON)
  add_library(ZLIB::ZLIB ALIAS zlib_checksum)
endif()
if(SNUG_BUILD_CLI AND NOT SNUG_TORCH_FREE_ONLY)
  FetchContent_MakeAvailable(CLI11)
endif()
if(SNUG_BUILD_TESTS)
  FetchContent_MakeAvailable(googletest)
endif()
