# Compiles the files of a folder as one, which takes a quarter to a half of the time, because headers
# are read once. Builds without this option show which file forgot to include a header.

# regard_unity(TARGET FOLDER... [EXCEPT FILE...]): EXCEPT lists files that define a name which another
# file of the folder defines too, in anonymous namespaces. Files with their own flags stay apart.
function(regard_unity target)
  cmake_parse_arguments(PARSE_ARGV 1 given "" "" EXCEPT)
  if(NOT REGARD_UNITY)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  target_compile_options(${target} PRIVATE -Wno-shadow)  # a name of another file
  foreach(folder IN LISTS given_UNPARSED_ARGUMENTS)
    file(GLOB sources CONFIGURE_DEPENDS ${folder}/*.cpp)
    foreach(file IN LISTS given_EXCEPT)
      list(REMOVE_ITEM sources ${CMAKE_CURRENT_SOURCE_DIR}/${file})
    endforeach()
    string(MAKE_C_IDENTIFIER ${folder} group)
    set_source_files_properties(${sources} PROPERTIES UNITY_GROUP ${group})
  endforeach()
endfunction()
