# Compiles through ccache where it is installed. The sloppiness is what it needs to accept precompiled headers; the base directory lets
# another clone, such as a fresh one, find what this one compiled.
option(SNUG_CCACHE "Compile through ccache if it is installed" ON)
if(SNUG_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(SNUG_CCACHE_PROGRAM ccache)
  mark_as_advanced(SNUG_CCACHE_PROGRAM)
  if(SNUG_CCACHE_PROGRAM)
    set(CMAKE_CXX_COMPILER_LAUNCHER
        "${CMAKE_COMMAND};-E;env;CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime;CCACHE_BASEDIR=${PROJECT_SOURCE_DIR};${SNUG_CCACHE_PROGRAM}")
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      add_compile_options(-fpch-preprocess)
    endif()
  endif()
endif()
