# One precompiled torch/torch.h for tests, examples and benchmarks, which include it all. The library and the program take the headers
# that they need: compiling those costs them no more than reading this, which is 700 MB large.
add_library(snug_pch OBJECT EXCLUDE_FROM_ALL ${CMAKE_CURRENT_LIST_DIR}/pch.cpp)
target_link_libraries(snug_pch PRIVATE snug_options snug::torch)
target_precompile_headers(snug_pch PRIVATE <torch/torch.h> <fmt/format.h>)
