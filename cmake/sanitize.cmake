# -DREGARD_SANITIZE=address,undefined (or thread): the whole build under sanitizers.
if(REGARD_SANITIZE)
  add_compile_options(-fsanitize=${REGARD_SANITIZE} -fno-omit-frame-pointer -g1
                      -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${REGARD_SANITIZE})
endif()
