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
message("package: all of it holds")
