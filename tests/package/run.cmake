# Installs snug into a fresh folder, looks at what is installed, and configures, builds and runs the consumer against it.
#   cmake -D BUILD=<snug's build folder> -D SOURCE=<this folder> -D WORK=<scratch> -D TORCH=<LibTorch> -P run.cmake
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${ARGN}\n${output}")
  endif()
  message("${output}")
endfunction()

# Configures the consumer in its own folder. The shell's LibTorch is not seen, only what is given.
function(configure folder status output)
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -E env --unset=Torch_DIR --unset=CMAKE_PREFIX_PATH --unset=VIRTUAL_ENV "${CMAKE_COMMAND}"
            -S "${SOURCE}" -B "${WORK}/${folder}" -G Ninja "-Dsnug_ROOT=${WORK}/prefix" ${ARGN}
    RESULT_VARIABLE run_status OUTPUT_VARIABLE run_output ERROR_VARIABLE run_output)
  set(${status} "${run_status}" PARENT_SCOPE)
  # CMake breaks the lines of a message where it likes.
  string(REGEX REPLACE "[ \n]+" " " run_output "${run_output}")
  set(${output} "${run_output}" PARENT_SCOPE)
endfunction()

function(expect_torch folder torch)
  configure(${folder} status output ${ARGN})
  if(NOT status EQUAL 0 OR NOT output MATCHES "consumer: LibTorch is ([^ ]+)" OR NOT CMAKE_MATCH_1 STREQUAL torch)
    message(FATAL_ERROR "${folder}: the consumer should be configured with ${torch}\n${output}")
  endif()
endfunction()

function(expect_refusal folder reason)
  configure(${folder} status output ${ARGN})
  string(REGEX MATCHALL "CMake Error" errors "${output}")
  list(LENGTH errors errors)
  string(FIND "${output}" "${reason}" found)
  if(status EQUAL 0 OR NOT errors EQUAL 1 OR found EQUAL -1)
    message(FATAL_ERROR "${folder}: the consumer should be refused, once, and told '${reason}'\n${output}")
  endif()
endfunction()

# LibTorch itself may lie in a build folder (script/setup puts it there), so it is taken out before.
function(expect_no_path_of_ours file)
  file(READ "${file}" text)
  string(REPLACE "${TORCH}" "<LibTorch>" text "${text}")
  string(REPLACE "${WORK}" "<consumer>" text "${text}")
  foreach(path IN ITEMS "${BUILD}" "${SOURCE_ROOT}/snug" "${SOURCE_ROOT}/build" "snug::fmt" "FMT_HEADER_ONLY")
    string(FIND "${text}" "${path}" found)
    if(NOT found EQUAL -1)
      message(FATAL_ERROR "${file} names ${path}, which is of no use to a consumer\n${text}")
    endif()
  endforeach()
endfunction()

function(write_torch_of_version version folder)
  file(WRITE "${folder}/include/ATen/ATen.h" "")
  file(WRITE "${folder}/share/cmake/Torch/TorchConfigVersion.cmake" "set(PACKAGE_VERSION \"${version}\")\n")
endfunction()

get_filename_component(SOURCE_ROOT "${SOURCE}/../.." ABSOLUTE)
file(REMOVE_RECURSE "${WORK}")
run("${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${WORK}/prefix")
file(GLOB_RECURSE installed "${WORK}/prefix/*.cmake")
foreach(file IN LISTS installed)
  expect_no_path_of_ours("${file}")
endforeach()

# Nothing is said about LibTorch: it is the one that snug was built with.
expect_torch(build "${TORCH}")
expect_no_path_of_ours("${WORK}/build/compile_commands.json")
run("${CMAKE_COMMAND}" --build "${WORK}/build")
run("${WORK}/build/consumer")
if(EXISTS "${WORK}/prefix/bin/snug")
  run("${WORK}/prefix/bin/snug" --version)
endif()

# The same version in another place may be named.
file(CREATE_LINK "${TORCH}" "${WORK}/elsewhere" SYMBOLIC)
expect_torch(by_torch_dir "${WORK}/elsewhere" "-DTorch_DIR=${WORK}/elsewhere/share/cmake/Torch")
expect_torch(by_prefix_path "${WORK}/elsewhere" "-DCMAKE_PREFIX_PATH=${WORK}/elsewhere")
expect_torch(by_python_prefix_path "${WORK}/elsewhere" "-DCMAKE_PREFIX_PATH=${WORK}/elsewhere/share/cmake")

# Another version is refused.
write_torch_of_version(99.0.0 "${WORK}/torch-99")
expect_refusal(other_torch_dir "snug was built with LibTorch" "-DTorch_DIR=${WORK}/torch-99/share/cmake/Torch")
expect_refusal(other_prefix_path "is version '99.0.0'" "-DCMAKE_PREFIX_PATH=${WORK}/torch-99")
expect_refusal(no_torch "there is no LibTorch" "-DTorch_DIR=${WORK}/prefix")

# A project that fetches snug configures with nothing of snug's own tests and program; its build is planned, and not made: that takes too long.
execute_process(
  COMMAND "${CMAKE_COMMAND}" -E env --unset=CMAKE_PREFIX_PATH "${CMAKE_COMMAND}" -S "${SOURCE}/fetch" -B "${WORK}/fetch" -G Ninja
          "-DSNUG_SOURCES=${SOURCE_ROOT}" "-DTorch_DIR=${TORCH}/share/cmake/Torch"
  RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "a project that fetches snug does not configure\n${output}")
endif()
run(ninja -C "${WORK}/fetch" -n consumer)
execute_process(COMMAND ninja -C "${WORK}/fetch" -t commands consumer OUTPUT_VARIABLE commands)
string(FIND "${commands}" "libsnug" found)
if(found EQUAL -1)
  message(FATAL_ERROR "the consumer that fetches snug is not linked to it")
endif()

# The archive holds the same as the installation, and a consumer builds with it; the Debian package holds it below /usr.
find_program(CPACK NAMES cpack HINTS "${CMAKE_ROOT}/../../bin" REQUIRED)
run("${CPACK}" --config "${BUILD}/CPackConfig.cmake" -B "${WORK}/packages")
file(GLOB archive "${WORK}/packages/snug-*.tar.gz")
file(GLOB debian "${WORK}/packages/snug-*.deb")
if(NOT archive OR NOT debian)
  message(FATAL_ERROR "cpack made no archive or no Debian package in ${WORK}/packages")
endif()
file(ARCHIVE_EXTRACT INPUT "${archive}" DESTINATION "${WORK}/unpacked")
file(GLOB unpacked "${WORK}/unpacked/*")
expect_torch(by_archive "${TORCH}" "-Dsnug_ROOT=${unpacked}")
run("${CMAKE_COMMAND}" --build "${WORK}/by_archive")
run("${WORK}/by_archive/consumer")
find_program(DPKG_DEB dpkg-deb)
if(DPKG_DEB)
  execute_process(COMMAND "${DPKG_DEB}" --contents "${debian}" OUTPUT_VARIABLE contents COMMAND_ERROR_IS_FATAL ANY)
  foreach(file IN ITEMS "/usr/include/snug/snug.h" "snugConfig.cmake" "/libsnug.")
    string(FIND "${contents}" "${file}" found)
    if(found EQUAL -1)
      message(FATAL_ERROR "${debian} has no ${file}\n${contents}")
    endif()
  endforeach()
endif()
message("package: all of it holds")
