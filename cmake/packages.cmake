# `cpack` in the build folder makes an archive and a Debian package of what `cmake --install` installs. LibTorch is no part of them: the
# package asks for the version that it was built with, in the place that it had, or in Torch_DIR.
set(CPACK_GENERATOR "TGZ;DEB")
set(CPACK_PACKAGE_NAME snug)
set(CPACK_PACKAGE_VENDOR "snug")
set(CPACK_PACKAGE_CONTACT "snug's authors")
set(CPACK_PACKAGE_FILE_NAME "snug-${PROJECT_VERSION}-${CMAKE_SYSTEM_PROCESSOR}-torch-${SNUG_TORCH_VERSION}")
set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
# LibTorch is no Debian package, so libraries are not looked up. The test `package` compares with what the library names.
set(CPACK_DEBIAN_PACKAGE_DEPENDS "libc6, libgcc-s1, libgomp1, libhwy1, libstdc++6, zlib1g")
include(CPack)
