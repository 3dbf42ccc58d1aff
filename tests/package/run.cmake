# Installs snug into a fresh folder, builds the consumer against it, runs it.
#   cmake -D BUILD=<snug's build folder> -D SOURCE=<this folder> -D WORK=<scratch> -D TORCH=<LibTorch> -P run.cmake
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${ARGN}\n${output}")
  endif()
  message("${output}")
endfunction()

file(REMOVE_RECURSE "${WORK}")
run("${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${WORK}/prefix")
run("${CMAKE_COMMAND}" -S "${SOURCE}" -B "${WORK}/build" -G Ninja -DCMAKE_PREFIX_PATH=${WORK}/prefix -DTorch_DIR=${TORCH})
run("${CMAKE_COMMAND}" --build "${WORK}/build")
run("${WORK}/build/consumer")
if(EXISTS "${WORK}/prefix/bin/snug")
  run("${WORK}/prefix/bin/snug" --version)
endif()
