# SNUG_SANITIZE: a list of sanitizers for everything that is built, such as "address,undefined".
if(SNUG_SANITIZE)
  add_compile_options(-fsanitize=${SNUG_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${SNUG_SANITIZE})
  if(NOT SNUG_TORCH_FREE_ONLY)
    add_compile_options(-fno-sanitize=vptr)  # LibTorch does not export the type information of all its classes
  endif()
endif()
