# Cheap guards of a library that strangers load: overflows of buffers on the stack end the program,
# and the tables of addresses are read-only once the library is loaded.
include(CheckCXXCompilerFlag)
include(CheckLinkerFlag)

function(regard_harden objects library)
  if(REGARD_SANITIZE)
    return()  # the sanitizers check more, and fortified functions hide calls from them
  endif()
  check_cxx_compiler_flag(-fstack-protector-strong REGARD_HAS_STACK_PROTECTOR)
  if(REGARD_HAS_STACK_PROTECTOR)
    target_compile_options(${objects} PRIVATE -fstack-protector-strong)
  endif()
  # Fortified functions need an optimising build; a distribution's own level stays.
  if(NOT "${CMAKE_CXX_FLAGS} $ENV{CXXFLAGS}" MATCHES "_FORTIFY_SOURCE")
    target_compile_definitions(${objects} PRIVATE
      $<$<CONFIG:Release,RelWithDebInfo,MinSizeRel>:_FORTIFY_SOURCE=2>)
  endif()
  check_linker_flag(CXX -Wl,-z,relro,-z,now REGARD_HAS_RELRO)
  if(REGARD_HAS_RELRO)
    target_link_options(${library} PRIVATE -Wl,-z,relro,-z,now)
  endif()
endfunction()
