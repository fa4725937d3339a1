# The texts that GPU kernels are compiled from at run time, as a table of strings in the library.
#
# As a module: regard_embed_kernel_texts(target). As a script (cmake -P) it writes the table; LIST
# names a file with one "name;path" a line, OUTPUT the table.
if(CMAKE_SCRIPT_MODE_FILE)
  file(STRINGS ${LIST} entries)
  set(count 0)
  set(table "// Written by cmake/embed_text.cmake.\n#include \"cuda/kernel_text.hpp\"\n\n"
    "namespace regard::cuda_backend {\n\nconst EmbeddedText kEmbeddedTexts[] = {\n")
  string(CONCAT table ${table})
  foreach(entry IN LISTS entries)
    string(REPLACE "|" ";" pair "${entry}")
    list(GET pair 0 name)
    list(GET pair 1 path)
    file(READ "${path}" text)
    string(APPEND table "{\"${name}\", R\"regard(${text})regard\"},\n")
    math(EXPR count "${count} + 1")
  endforeach()
  string(APPEND table "};\nconst int kEmbeddedTextCount = ${count};\n\n"
    "}  // namespace regard::cuda_backend\n")
  file(WRITE ${OUTPUT} "${table}")
  return()
endif()

set(REGARD_EMBED_SCRIPT ${CMAKE_CURRENT_LIST_FILE})

function(regard_embed_kernel_texts target)
  set(source ${PROJECT_SOURCE_DIR}/src)
  file(GLOB_RECURSE texts CONFIGURE_DEPENDS
    ${source}/cuda/kernels/*.h ${source}/cuda/kernels/*.cuh ${source}/plan/cuda/kernel/*.h
    ${source}/semantics/*.h)
  list(APPEND texts ${source}/problem/problem.h)
  list(SORT texts)
  set(lines "")
  foreach(path IN LISTS texts)
    file(RELATIVE_PATH name ${source} ${path})
    string(APPEND lines "${name}|${path}\n")
  endforeach()
  set(type ${PROJECT_SOURCE_DIR}/include/regard/type.hpp)
  string(APPEND lines "regard/type.hpp|${type}\n")
  set(list ${PROJECT_BINARY_DIR}/kernel_texts.txt)
  file(CONFIGURE OUTPUT ${list} CONTENT "${lines}" @ONLY)
  set(output ${PROJECT_BINARY_DIR}/kernel_texts.cpp)
  add_custom_command(OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} -DLIST=${list} -DOUTPUT=${output} -P ${REGARD_EMBED_SCRIPT}
    DEPENDS ${texts} ${type} ${list} ${REGARD_EMBED_SCRIPT} VERBATIM)
  target_sources(${target} PRIVATE ${output})
endfunction()
