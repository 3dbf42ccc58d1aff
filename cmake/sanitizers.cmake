# SNUG_SANITIZE: a list of sanitizers for everything that is built, such as "address,undefined".
if(SNUG_SANITIZE)
  add_compile_options(-fsanitize=${SNUG_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${SNUG_SANITIZE})
endif()
