# snug_warnings: what our own targets are compiled with. Linked PRIVATE, never exported to those who use snug.
add_library(snug_warnings INTERFACE)
target_compile_options(
  snug_warnings INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wconversion
                          # Aggregates of options are filled by designated initialisers, the rest keeps its default.
                          -Wno-missing-field-initializers
                          # GCC 12 sees overlaps in std::string's own code where there are none (GCC bug 105651).
                          $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>
                          # It takes the sources of a unity build for headers.
                          $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage> $<$<BOOL:${SNUG_WERROR}>:-Werror>)
