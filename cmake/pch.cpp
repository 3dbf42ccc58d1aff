// Carries the precompiled header of snug/CMakeLists.txt; there is nothing here to compile.
