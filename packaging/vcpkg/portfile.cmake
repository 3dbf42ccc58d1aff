# An overlay port of this source tree:  vcpkg install snug --overlay-ports=packaging/vcpkg
# vcpkg's own libtorch is older than what snug needs, so LibTorch is that of the variable Torch_DIR, which vcpkg is told to pass on:
#   VCPKG_KEEP_ENV_VARS=Torch_DIR Torch_DIR=.../share/cmake/Torch vcpkg install ...
if(NOT DEFINED ENV{Torch_DIR})
  message(FATAL_ERROR "snug: set Torch_DIR to the share/cmake/Torch of a LibTorch from 2.11 on, and VCPKG_KEEP_ENV_VARS=Torch_DIR")
endif()
get_filename_component(SOURCE_PATH "${CURRENT_PORT_DIR}/../.." ABSOLUTE)
vcpkg_check_features(OUT_FEATURE_OPTIONS features FEATURES tools SNUG_BUILD_CLI)
vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS -DSNUG_BUILD_TESTS=OFF -DSNUG_BUILD_EXAMPLES=OFF -DSNUG_BUILD_PYTHON=OFF -DSNUG_BUILD_C=OFF "-DTorch_DIR=$ENV{Torch_DIR}" ${features})
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/snug)
if("tools" IN_LIST FEATURES)
  vcpkg_copy_tools(TOOL_NAMES snug AUTO_CLEAN)
endif()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include" "${CURRENT_PACKAGES_DIR}/debug/share")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
