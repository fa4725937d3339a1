# The kernel files of each instruction set, each compiled with its own flags and chosen at run time.
function(regard_add_isa_sources target)
  set(avx2 -mavx2 -mfma -mf16c)
  set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
  set(avx512bf16 ${avx512} -mavx512bf16)
  set(isas scalar)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    list(APPEND isas avx2 avx512 avx512bf16)
    target_sources(${target} PRIVATE src/cpu/processor_x86.cpp)
  else()
    target_sources(${target} PRIVATE src/cpu/processor_any.cpp)
  endif()
  foreach(isa IN LISTS isas)
    set(source src/cpu/kernels/isa_${isa}.cpp)
    target_sources(${target} PRIVATE ${source})
    set(flags ${${isa}})
    # GCC 12 takes the undefined operands inside its own AVX-512 intrinsics for a mistake of ours.
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      list(APPEND flags -Wno-maybe-uninitialized -Wno-uninitialized)
    endif()
    # GCC warns of arrays whose bound is an int that depends on a template.
    list(APPEND flags -Wno-sign-conversion)
    # Contraction would let one ISA's scalar code round unlike another's.
    list(APPEND flags -ffp-contract=off -O3)
    # The guards of harden.cmake cost time in the innermost functions.
    list(APPEND flags -fno-stack-protector -U_FORTIFY_SOURCE)
    set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "${flags}")
  endforeach()
endfunction()
